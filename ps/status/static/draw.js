"use strict";
// Figures as SVG. Times are seconds. No styles inline: the page's policy forbids them; attributes may name variables.
const draw = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const SPANS = {
    download: ["--s0", "download"], training: ["--s4", "training, by its own account (unverified)"],
    upload: ["--s1", "upload"], conditioning: ["--s2", "checking and projecting"],
  };

  const make = (parent, name, attributes, text) => {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  const sheet = (box, height, label) => {
    const width = Math.max(240, Math.floor(box.clientWidth));
    const svg = document.createElementNS(NS, "svg");
    for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": label })) svg.setAttribute(key, value);
    box.replaceChildren(svg);
    return [svg, width];
  };
  const empty = (box, text) => {
    const said = document.createElement("p");
    said.className = "empty";
    said.textContent = text;
    box.replaceChildren(said);
  };

  const digits = (value) => String(+value.toPrecision(4));
  const time = (s) => {
    if (s >= 5400) return `${+(s / 3600).toFixed(1)} h`;
    if (s >= 100) return `${+(s / 60).toFixed(1)} min`;
    for (const [factor, unit] of [[1, "s"], [1e3, "ms"]]) if (s * factor >= 1) return `${+(s * factor).toPrecision(3)} ${unit}`;
    return `${+(s * 1e6).toPrecision(3)} µs`;
  };
  const unitOf = (end) => end >= 300 ? ["min", 60] : end >= 2 ? ["s", 1] : end >= 2e-3 ? ["ms", 1e-3] : ["µs", 1e-6];

  // Round numbers from 0 or more on, as many as there is room for; ``whole`` for counts.
  const ticks = (from, to, most, whole) => {
    const rough = Math.max((to - from) / Math.max(1, most), whole ? 1 : 1e-12), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((k) => k >= rough * (1 - 1e-9) && !(whole && k % 1));
    const first = Math.ceil(from / step - 1e-9);
    return Array.from({ length: Math.max(0, Math.floor(to / step + 1e-9) - first + 1) }, (_, k) => (first + k) * step);
  };

  const axes = (svg, area, x, y, xs, ys, xLabel, yLabel, show = digits) => {
    for (const value of ys) {
      make(svg, "line", { x1: area.left, x2: area.right, y1: y(value), y2: y(value), stroke: "var(--grid)" });
      make(svg, "text", { x: area.left - 6, y: y(value) + 4, "text-anchor": "end" }, show(value));
    }
    for (const value of xs) {
      make(svg, "line", { x1: x(value), x2: x(value), y1: area.bottom, y2: area.bottom + 4, stroke: "var(--soft)" });
      make(svg, "text", { x: x(value), y: area.bottom + 16, "text-anchor": "middle" }, digits(value));
    }
    make(svg, "line", { x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom, stroke: "var(--soft)" });
    make(svg, "text", { x: (area.left + area.right) / 2, y: area.bottom + 32, "text-anchor": "middle" }, xLabel);
    make(svg, "text", { x: area.left - 44, y: 11 }, yLabel);
  };
  const wide = (values, show) => 7 * Math.max(...values.map((value) => show(value).length)) + 14;

  // One curve over rounds; ``limit`` is a level to keep below.
  const curve = (box, points, { end, xLabel = "round", yLabel, label, top, limit, limitText, colour }) => {
    const [svg, width] = sheet(box, 230, label);
    const area = { left: 52, right: width - 14, top: 24, bottom: 188 };
    const last = Math.max(1, end, points[points.length - 1][0]);
    const high = top ?? 1.08 * Math.max(limit ?? 0, ...points.map(([, y]) => y), 1e-9);
    const x = (value) => area.left + ((area.right - area.left) * value) / last;
    const y = (value) => area.bottom - ((area.bottom - area.top) * Math.min(value, high)) / high;
    const xs = ticks(0, last, Math.floor((area.right - area.left) / wide([last], digits)), true);
    axes(svg, area, x, y, xs, ticks(0, high, 4), xLabel, yLabel);
    if (limit !== undefined && limit !== null) {
      make(svg, "line", { x1: area.left, x2: area.right, y1: y(limit), y2: y(limit), stroke: "var(--s1)",
        "stroke-dasharray": "5 4" });
      make(svg, "text", { x: area.right, y: y(limit) - 5, "text-anchor": "end" }, limitText);
    }
    const path = points.map(([a, b], k) => `${k ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    make(svg, "path", { d: path, fill: "none", stroke: `var(${colour})`, "stroke-width": 2, "stroke-linejoin": "round" });
    const [endX, endY] = points[points.length - 1];
    make(svg, "circle", { cx: x(endX), cy: y(endY), r: 3.5, fill: `var(${colour})` });
  };

  // One bar a round, its segments on top of one another.
  const phases = (box, rounds) => {
    const [svg, width] = sheet(box, 250, "phases of the last rounds");
    const longest = Math.max(...rounds.map((round) => round.latency_s));
    const sorted = rounds.map((round) => round.latency_s).sort((a, b) => a - b);
    const usual = sorted[Math.floor(0.9 * (sorted.length - 1))];
    const high = longest <= 3 * usual ? 1.05 * longest : 1.4 * usual; // one long round must not flatten all others
    const [unit, per] = unitOf(high), area = { left: 52, right: width - 14, top: 24, bottom: 206 };
    const step = Math.min(48, (area.right - area.left) / rounds.length), first = rounds[0].round;
    const x = (round) => area.left + step * (round - first + 0.5);
    const y = (value) => area.bottom - ((area.bottom - area.top) * Math.min(value, high)) / high;
    const last = rounds[rounds.length - 1].round;
    const most = Math.floor((step * rounds.length) / wide([last], digits));
    const xs = ticks(first, last, most, true);
    axes(svg, area, x, y, xs, ticks(0, high / per, 4).map((value) => value * per), "round", `time (${unit})`,
      (value) => digits(value / per));
    for (const round of rounds) {
      let at = 0;
      for (const [name, seconds] of Object.entries(round.segments)) {
        const low = y(at), up = y(at + seconds);
        at += seconds;
        if (low - up < 0.05) continue;
        const bar = make(svg, "rect", { x: x(round.round) - 0.4 * step, width: 0.8 * step, y: up, height: low - up,
          fill: `var(--g-${name}, var(--g0))`, "data-segment": name });
        make(bar, "title", {}, `round ${round.round}, ${name}: ${time(seconds)} of ${time(round.latency_s)}`);
      }
      if (round.latency_s > high) {
        const mark = make(svg, "path", { d: `M${x(round.round) - 4} ${area.top - 2}l4 -7l4 7z`, fill: "var(--bad)" });
        make(mark, "title", {}, `round ${round.round}: ${time(round.latency_s)}, more than the axis shows`);
      }
    }
    return longest > high;
  };

  // Spans of one round below its segments.
  const waterfall = (box, data) => {
    const row = 14, head = 34, bottom = head + row * data.clients.length;
    const [svg, width] = sheet(box, bottom + 36, `waterfall of round ${data.round}`);
    const left = 52, right = width - 14;
    const end = Math.max(data.latency_s, 1e-6, ...data.spans.map(([, , start, took]) => start + took));
    const [unit, per] = unitOf(end), x = (seconds) => left + ((right - left) * seconds) / end;
    for (const value of ticks(0, end / per, Math.max(3, Math.floor((right - left) / 70)))) {
      make(svg, "line", { x1: x(value * per), x2: x(value * per), y1: head - 6, y2: bottom, stroke: "var(--grid)" });
      make(svg, "text", { x: Math.min(x(value * per), width - 16), y: bottom + 14, "text-anchor": "middle" }, digits(value));
    }
    make(svg, "text", { x: (left + right) / 2, y: bottom + 30, "text-anchor": "middle" }, `time since the model was available (${unit})`);
    make(svg, "text", { x: left - 6, y: 18, "text-anchor": "end" }, "server");
    let at = 0;
    for (const [name, seconds] of Object.entries(data.segments)) {
      const bar = make(svg, "rect", { x: x(at), y: 7, width: Math.max(0.5, x(at + seconds) - x(at)), height: 15,
        fill: `var(--g-${name}, var(--g0))`, "data-segment": name });
      make(bar, "title", {}, `${name}: ${time(seconds)}`);
      at += seconds;
    }
    data.clients.forEach((client, place) =>
      make(svg, "text", { x: left - 6, y: head + row * place + 10, "text-anchor": "end" }, client));
    for (const [name, client, start, took] of data.spans) {
      const inner = name === "conditioning", [colour, words] = SPANS[name] || ["--s7", name];
      const bar = make(svg, "rect", { x: x(start), y: head + row * data.clients.indexOf(client) + (inner ? 7 : 2),
        width: Math.max(2, x(start + took) - x(start)), height: inner ? 4 : 9, rx: 1.5, fill: `var(${colour})`,
        opacity: name === "training" ? 0.55 : 1, "data-span": name });
      make(bar, "title", {}, `client ${client}, ${words}: ${time(took)} from ${time(start)} on`);
    }
  };

  const legend = (list, entries) => {
    if (list.dataset.entries === JSON.stringify(entries)) return;
    list.dataset.entries = JSON.stringify(entries);
    list.replaceChildren(...entries.map(([colour, text]) => {
      const item = document.createElement("li"), svg = document.createElementNS(NS, "svg");
      svg.setAttribute("width", 11);
      svg.setAttribute("height", 11);
      svg.setAttribute("aria-hidden", "true");
      make(svg, "rect", { width: 11, height: 11, rx: 2, fill: `var(${colour})` });
      item.append(svg, text);
      return item;
    }));
  };

  return { SPANS, curve, digits, empty, legend, phases, time, waterfall };
})();
