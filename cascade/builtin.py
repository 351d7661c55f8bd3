"""The built-in rules and controllers, registered as any plugin would register its own."""

from __future__ import annotations

from cascade.hookspecs import hookimpl


@hookimpl
def cascade_register_rules() -> dict[str, str]:
    """Verification rules."""
    return {
        "coupled": "cascade.rules:Coupled",
        "rejection": "cascade.rejection:Rejection",
        "block": "cascade.rejection:Block",
        "traversal": "cascade.rejection:Traversal",
    }


@hookimpl
def cascade_register_controllers() -> dict[str, str]:
    """Policies that set K."""
    return {
        "pid": "cascade.control.pid:Pid",
        "fixed": "cascade.control.fixed:Fixed",
        "ema": "cascade.control.ema:Ema",
        "goodput": "cascade.control.goodput:Goodput",
        "entropy": "cascade.control.entropy:Entropy",
        "hedge": "cascade.control.hedge:Hedge",
    }
