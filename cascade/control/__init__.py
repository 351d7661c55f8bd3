"""Control: how many tokens a level proposes, and whether it proposes at all. Imports no torch."""

from cascade.control.base import Controller, Estimates, Outcome
from cascade.control.fixed import Fixed
from cascade.control.gate import Decision, Gate, Investment
from cascade.control.pid import Pid

__all__ = ["Controller", "Decision", "Estimates", "Fixed", "Gate", "Investment", "Outcome", "Pid"]
