"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const mouse = matchMedia("(hover: hover) and (pointer: fine)");
  const drawn = new Map(); // element -> the figure it shows, in light colours
  const rules = ["solid", "double", "dashed", "dotted"];
  const target = data.levels.length - 1;

  // -- charts: figures carry light colours, a dark page replaces each by its partner --------------------

  const themed = (value) => {
    if (typeof value === "string") return (dark.matches && data.dark[value]) || value;
    if (Array.isArray(value)) return value.map(themed);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, themed(one)]));
  };

  const draw = (place, figure) => {
    drawn.set(place, figure);
    const layout = { ...figure.layout, template: data.template };
    if (mouse.matches && place.id === "timeline") layout.dragmode = "zoom"; // a finger scrolls the page instead
    const config = { responsive: true, displayModeBar: false };
    place.style.minHeight = `${figure.layout.height}px`;
    return Plotly.react(place, themed(figure.data), themed(layout), config);
  };

  for (const [name, figure] of Object.entries(data.charts)) draw(document.getElementById(`chart-${name}`), figure);
  dark.addEventListener("change", () => drawn.forEach((figure, place) => draw(place, figure)));

  // -- one request ---------------------------------------------------------------------------------------

  const choose = document.getElementById("choose");
  if (choose === null) return;
  const text = document.getElementById("text");
  const detail = document.getElementById("detail");
  const legend = document.getElementById("legend");
  const timeline = document.getElementById("timeline");
  let request = null;
  let roundOf = []; // of each token, the index of its round
  let chosen = -1;

  const coloured = (element, level) => {
    element.style.setProperty("--level", `var(--level-${level})`);
    if (level < target) element.style.setProperty("--rule", rules[level % rules.length]);
    return element;
  };

  const part = (name, [k, drafted, tested, accepted, bypassed, reason]) => {
    const said = bypassed ? "bypassed" : k === null ? "not asked"
      : `K ${k}, ${drafted} drafted, ${tested} tested, ${accepted} accepted`;
    return `${name}: ${said}${reason ? ` (${reason})` : ""}`;
  };

  const describe = (index) => {
    const [round, count, batch, seconds, parts] = request.rounds[roundOf[index]];
    const author = data.levels[request.origins[index]] ?? "unknown";
    const piece = request.pieces === null ? "" : ` ${JSON.stringify(request.pieces[index])}`;
    const who = request.origins[index] === target ? `written by ${author}, the target` : `first proposed by ${author}`;
    const company = batch > 1 ? `, ${batch} requests together` : "";
    return [
      `Token ${index + 1}, id ${request.tokens[index]}${piece}: ${who}`,
      `Round ${round}: ${count} token${count === 1 ? "" : "s"} in ${(1000 * seconds).toFixed(1)} ms${company}`,
      ...parts.map((one, level) => part(data.levels[level], one)),
    ].join("\n");
  };

  const pick = (index, scroll) => {
    text.children[chosen]?.classList.remove("chosen");
    chosen = index;
    const token = text.children[index];
    if (token === undefined) return;
    token.classList.add("chosen");
    detail.textContent = describe(index);
    if (scroll) token.scrollIntoView({ block: "nearest" });
  };

  const token = (index) => {
    const piece = request.pieces?.[index];
    const span = coloured(document.createElement("span"), request.origins[index]);
    span.className = "token";
    span.textContent = piece ?? request.tokens[index];
    span.classList.toggle("id", piece === undefined);
    span.classList.toggle("line", piece !== undefined && piece.startsWith("\n"));
    span.classList.toggle("edge", index > 0 && roundOf[index] !== roundOf[index - 1]);
    return span;
  };

  const label = (name, level) => {
    const item = document.createElement("li");
    const swatch = coloured(document.createElement("span"), level);
    const count = request.origins.filter((origin) => origin === level).length;
    const share = request.origins.length ? Math.round((100 * count) / request.origins.length) : 0;
    swatch.textContent = name + (level === target ? " (target)" : "");
    item.append(swatch, ` ${count} (${share} %)`);
    return item;
  };

  const show = () => {
    request = data.requests[Number(choose.value)];
    roundOf = request.rounds.flatMap(([, count], index) => Array(count).fill(index));
    chosen = -1;
    legend.replaceChildren(...data.levels.map(label));
    text.replaceChildren(...request.tokens.map((_, index) => token(index)));
    text.scrollTop = 0;
    detail.textContent = "Hover over a token, tap it, or walk with the arrow keys to see where it comes from.";
    if (timeline !== null) draw(timeline, request.figure);
  };

  const over = (event) => {
    const span = event.target.closest(".token");
    if (span !== null) pick([...text.children].indexOf(span), false);
  };

  // Keys scroll the text under a mouse that rests: what comes to lie there is not what was pointed at.
  let keyed = false;
  text.addEventListener("pointerover", (event) => keyed || over(event));
  text.addEventListener("pointermove", (event) => {
    if (!keyed || (event.movementX === 0 && event.movementY === 0)) return;
    keyed = false;
    over(event);
  });
  text.addEventListener("click", over);
  text.addEventListener("keydown", (event) => {
    const last = request.tokens.length - 1;
    const next = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, ArrowDown: chosen + 10, ArrowUp: chosen - 10, Home: 0, End: last };
    if (!(event.key in next) || last < 0) return;
    event.preventDefault();
    keyed = true;
    pick(Math.min(Math.max(next[event.key], 0), last), true);
  });
  choose.addEventListener("change", show);
  show();
})();
