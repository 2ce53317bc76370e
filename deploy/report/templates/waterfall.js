"use strict";
// Draws one round of the run at a time: its segments, and below them what every client did. Times are microseconds.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const ROW = 15, HEAD = 34, FOOT = 34, LEFT = 52, RIGHT = 12;
  const SPANS = {
    download: ["--s0", "download"], training: ["--s4", "training, by its own account (unverified)"],
    upload: ["--s1", "upload"], conditioning: ["--s2", "checking and projecting"], noise: ["--s3", "drawing noise"],
  };
  const make = (parent, name, attributes, text) => {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  const time = (us) => us >= 1e6 ? `${+(us / 1e6).toPrecision(4)} s` : us >= 1e3 ? `${+(us / 1e3).toPrecision(4)} ms`
    : `${Math.round(us)} µs`;
  const bytes = (count) => count >= 1e6 ? `${(count / 1e6).toPrecision(3)} MB` : count >= 1e3
    ? `${(count / 1e3).toPrecision(3)} kB` : `${count} B`;
  const colourOf = (name) => (SPANS[name] || ["--s7"])[0];

  const ticks = (end, room) => {
    const most = Math.max(3, Math.floor(room / 72)), rough = end / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((k) => k >= rough);
    return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, k) => k * step);
  };

  const rowsOf = (data, round) => {
    const clients = new Map(), spans = [];
    for (let k = 0; k < round.p.length; k += 5) {
      const [name, client, start, took, size] = round.p.slice(k, k + 5);
      const span = { name: data.spans[name], client, start, took, size };
      spans.push(span);
      clients.set(client, Math.max(clients.get(client) ?? 0, start + took));
    }
    const order = [...clients.keys()].sort((a, b) => (a < 0) - (b < 0) || clients.get(a) - clients.get(b) || a - b);
    return { order, spans };
  };

  const draw = (box, data, round) => {
    const chart = box.querySelector(".chart"), width = Math.max(260, Math.floor(chart.clientWidth));
    const { order, spans } = rowsOf(data, round);
    const end = Math.max(round.l, 1, ...spans.map((span) => span.start + span.took));
    const room = width - LEFT - RIGHT, x = (us) => LEFT + (room * us) / end;
    const bottom = HEAD + ROW * order.length, height = bottom + FOOT;
    const svg = document.createElementNS(NS, "svg");
    for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "font-size": 11, "aria-label": `waterfall of round ${round.r}` })) svg.setAttribute(key, value);
    const hatch = make(make(svg, "defs", {}), "pattern", { id: `${box.id}-hatch`, width: 5, height: 5,
      patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    make(hatch, "rect", { width: 5, height: 5, style: "fill: var(--s4)", opacity: 0.35 });
    make(hatch, "rect", { width: 2, height: 5, style: "fill: var(--s4)" });
    const unit = end >= 2e6 ? ["s", 1e6] : end >= 2e3 ? ["ms", 1e3] : ["µs", 1];
    for (const tick of ticks(end, room)) {
      make(svg, "line", { x1: x(tick), x2: x(tick), y1: HEAD - 6, y2: bottom, style: "stroke: var(--grid)" });
      make(svg, "text", { x: x(tick), y: bottom + 14, "text-anchor": "middle", style: "fill: var(--ink)" },
        String(+(tick / unit[1]).toPrecision(4)));
    }
    make(svg, "text", { x: LEFT + room / 2, y: bottom + 29, "text-anchor": "middle", style: "fill: var(--ink)" },
      `time after θₜ was available (${unit[0]})`);
    make(svg, "text", { x: LEFT - 6, y: 18, "text-anchor": "end", style: "fill: var(--ink)" }, "server");
    let at = 0;
    for (let k = 0; k < round.s.length; k += 2) {
      const name = data.segments[round.s[k]], took = round.s[k + 1];
      const bar = make(svg, "rect", { x: x(at), y: 7, width: Math.max(0.5, x(at + took) - x(at)), height: 15,
        "data-segment": name, style: `fill: var(${data.colours[name]}); stroke: var(--paper); stroke-width: 0.5` });
      make(bar, "title", {}, `${name}: ${time(took)}`);
      at += took;
    }
    order.forEach((client, place) => {
      const adversary = client >= data.adversaries[0] && client < data.adversaries[1];
      make(svg, "text", { x: LEFT - 6, y: HEAD + ROW * place + 11, "text-anchor": "end", style: "fill: var(--ink)" },
        client < 0 ? "server" : `${client}${adversary ? "*" : ""}`);
    });
    const place = new Map(order.map((client, k) => [client, k]));
    for (const span of spans) {
      const inner = ["conditioning", "noise"].includes(span.name) && span.client >= 0;
      const bar = make(svg, "rect", { x: x(span.start), y: HEAD + ROW * place.get(span.client) + (inner ? 8 : 2),
        width: Math.max(1, x(span.start + span.took) - x(span.start)), height: inner ? 4 : 10, rx: 1.5,
        "data-span": span.name, "data-client": span.client,
        style: `fill: ${span.name === "training" ? `url(#${box.id}-hatch)` : `var(${colourOf(span.name)})`}` });
      make(bar, "title", {}, `${span.client < 0 ? "server" : `client ${span.client}`}, ${
        (SPANS[span.name] || [0, span.name])[1]}: ${time(span.took)} from ${time(span.start)} on${
        span.size ? `, ${bytes(span.size)}` : ""}`);
    }
    make(svg, "line", { x1: x(round.l), x2: x(round.l), y1: 3, y2: bottom,
      style: "stroke: var(--ink); stroke-dasharray: 4 3" });
    chart.replaceChildren(svg);
    const missing = round.x ? `; without ${round.m.join(", ")}${round.x > round.m.length ? ", …" : ""}` : "";
    const part = round.k < round.c ? `; ${round.k} of ${round.c} clients are shown` : "";
    const none = round.p.length ? "" : "; no spans were recorded";
    box.querySelector(".said").textContent =
      `Round ${round.r}: ${time(round.l)} (dashed), ${round.n} answered${missing}${part}${none}.`;
  };

  const legend = (box, data) => {
    const list = box.querySelector(".legend");
    const entry = (colour, text) => {
      const item = document.createElement("li"), svg = document.createElementNS(NS, "svg");
      svg.setAttribute("width", 11); svg.setAttribute("height", 11);
      make(svg, "rect", { width: 11, height: 11, rx: 2, style: `fill: ${colour}` });
      item.append(svg, text);
      list.append(item);
    };
    const known = Object.keys(SPANS), rank = (name) => known.includes(name) ? known.indexOf(name) : known.length;
    for (const name of [...data.spans].sort((a, b) => rank(a) - rank(b))) {
      entry(name === "training" ? `url(#${box.id}-hatch)` : `var(${colourOf(name)})`, (SPANS[name] || [0, name])[1]);
    }
    if (data.adversaries[1] > data.adversaries[0] && data.spans.length) {
      const item = document.createElement("li");
      item.textContent = "* held by the adversary";
      list.append(item);
    }
    for (const name of data.segments) entry(`var(${data.colours[name]})`, `server: ${name}`);
  };

  for (const box of document.querySelectorAll(".waterfall")) {
    const data = JSON.parse(box.querySelector("script").textContent);
    const select = box.querySelector("select"), slider = box.querySelector("input");
    data.rounds.forEach((round, k) => select.add(new Option(`${round.r} (${time(round.l)})`, k)));
    slider.max = data.rounds.length - 1;
    const show = (place) => {
      const k = Math.min(data.rounds.length - 1, Math.max(0, place));
      select.value = slider.value = k;
      draw(box, data, data.rounds[k]);
    };
    select.addEventListener("change", () => show(Number(select.value)));
    slider.addEventListener("input", () => show(Number(slider.value)));
    box.querySelectorAll("button").forEach((button) =>
      button.addEventListener("click", () => show(Number(slider.value) + Number(button.dataset.step))));
    let drawnAt = 0;
    new ResizeObserver(() => {
      const width = box.querySelector(".chart").clientWidth;
      if (width && width !== drawnAt) { drawnAt = width; show(Number(slider.value)); }
    }).observe(box.querySelector(".chart"));
    legend(box, data);
    show(data.first);
    drawnAt = box.querySelector(".chart").clientWidth;
  }
})();
