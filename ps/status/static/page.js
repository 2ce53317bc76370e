"use strict";
// Keeps the page at what the parameter server says: one stream of events, opened anew whenever it breaks.
(() => {
  const SILENT_S = 4, AGAIN_MS = 2000;
  const find = (selector) => document.querySelector(selector);
  const operator = location.pathname.startsWith("/operator/");
  const MEANINGS = {
    open: "until clients may answer", first: "until the first momentum is complete",
    collect: "until as many have answered as set the pace", grace: "waiting for the others",
    close: "until the round is being made", noise: "waiting for the noise", transfer: "from host to device",
    aggregate: "projection, rule and release", step: "server momentum and model step",
    commit: "made durable on disk", hold: "until the public schedule allows", publish: "until the model is available",
  };

  // A token in the address has done its work: the cookie has it now, and histories need not keep it.
  if (location.search) history.replaceState(null, "", location.pathname);

  let state = null, heardAt = performance.now(), over = false, source = null;

  const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const cell = (row, text, kind = "td", name = "") => {
    const element = document.createElement(kind);
    element.textContent = text;
    if (name) element.className = name;
    row.append(element);
  };
  const table = (element, head, rows) => {
    const top = document.createElement("tr"), body = [];
    for (const [text, name] of head) cell(top, text, "th", name);
    for (const cells of rows) {
      const row = document.createElement("tr");
      cells.forEach((item, k) => cell(row, ...(Array.isArray(item) ? [item[0], "td", item[1]] : [item, "td", head[k][1]])));
      body.push(row);
    }
    element.replaceChildren(top, ...body);
  };
  const percent = (share) => `${(100 * share).toFixed(2)} %`;

  const tilesOf = (s) => {
    const last = s.accuracy[s.accuracy.length - 1], spent = s.privacy.spent[s.privacy.spent.length - 1], o = s.operator;
    const found = [["Round", `${s.round} of ${s.rounds}`, `${Math.floor((100 * s.round) / s.rounds)} % are done`]];
    if (o) {
      found.push(["Time left", o.left_s === null ? "–" : s.round >= s.rounds ? "none" : draw.time(o.left_s),
        "if the rounds go on like the last ones"]);
      found.push(["Time per round", o.latency_s === null ? "–" : draw.time(o.latency_s), "median of the last ones"]);
    }
    found.push(["Accuracy", last ? percent(last[1]) : "–", last ? `after ${last[0]} rounds` : "not evaluated yet"]);
    found.push(s.privacy.epsilon === null ? ["Privacy", "none", "no noise was asked for"]
      : ["Privacy spent", spent ? `ε = ${draw.digits(+spent[1].toPrecision(3))}` : "ε = 0",
        `of ε = ${draw.digits(s.privacy.epsilon)}, δ = ${s.privacy.delta}${s.privacy.private ? "" : "; not guaranteed"}`]);
    if (o) {
      found.push(["Live members", o.live === null ? "–" : `${o.live} of ${s.clients}`,
        o.answered === null ? "no round has closed yet" : `${o.answered} answered the last round`]);
    }
    return found;
  };

  const showTiles = (s) => {
    const box = find("#tiles"), wanted = tilesOf(s);
    while (box.children.length > wanted.length) box.lastChild.remove();
    wanted.forEach(([name, value, about], k) => {
      let tile = box.children[k];
      if (!tile) {
        tile = document.createElement("div");
        tile.className = "tile";
        tile.append(document.createElement("span"), document.createElement("b"), document.createElement("span"));
        box.append(tile);
      }
      [name, value, about].forEach((text, part) => say(tile.children[part], text));
    });
  };

  const showCurves = (s) => {
    const accuracy = find("#accuracy .chart"), epsilon = find("#epsilon .chart"), { privacy } = s;
    if (s.accuracy.length) {
      draw.curve(accuracy, s.accuracy.map(([round, share]) => [round, 100 * share]),
        { end: s.rounds, yLabel: "accuracy (%)", label: "accuracy over rounds", top: 100, colour: "--s0" });
    } else draw.empty(accuracy, "No model was evaluated yet.");
    if (privacy.epsilon === null) {
      say(find("#epsilon .note"), "no noise was asked for");
      draw.empty(epsilon, "This run promises no privacy.");
    } else {
      const names = privacy.premises.map((premise) => premise.split(":")[0]).join(", ");
      say(find("#epsilon .note"), `ε at δ = ${privacy.delta} of the releases so far, from the ledger; under ${names}`);
      const points = privacy.spent.length ? privacy.spent : [[0, 0]];
      draw.curve(epsilon, points[0][0] ? [[0, 0], ...points] : points, { end: s.rounds, yLabel: "ε (no unit)",
        label: "epsilon over rounds", limit: privacy.epsilon, limitText: `budget: ε = ${draw.digits(privacy.epsilon)}`,
        colour: "--s2" });
    }
  };

  const showPremises = (s) => {
    find("#premises").hidden = s.privacy.epsilon === null;
    say(find("#because"), `${s.privacy.private_because[0].toUpperCase()}${s.privacy.private_because.slice(1)}.${
      s.privacy.neighbouring ? ` Protected: ${s.privacy.neighbouring}.` : ""}`);
    const list = find("#premises ul"), premises = JSON.stringify(s.privacy.premises);
    if (list.dataset.of === premises) return;
    list.dataset.of = premises;
    list.replaceChildren(...s.privacy.premises.map((premise) => {
      const item = document.createElement("li");
      item.textContent = premise;
      return item;
    }));
  };

  const showRounds = (o) => {
    const chart = find("#phases .chart");
    if (!o.recent.length) draw.empty(chart, "No round was published yet.");
    else {
      const cut = draw.phases(chart, o.recent), names = Object.keys(MEANINGS)
        .filter((name) => o.recent.some((round) => round.segments[name] > 0.01 * round.latency_s));
      const entries = names.map((name) => [`--g-${name}`, `${name}: ${MEANINGS[name]}`]);
      draw.legend(find("#phases .legend"), cut ? [...entries, ["--bad", "longer than the axis shows"]] : entries);
    }
    const last = o.waterfall, below = find("#waterfall .chart");
    if (!last || !last.spans.length) {
      say(find("#waterfall .note"), "");
      draw.empty(below, "No round was published yet.");
      return;
    }
    say(find("#waterfall .note"), `round ${last.round}, ${draw.time(last.latency_s)}${
      last.left_out ? `; the ${last.clients.length} slowest of ${last.clients.length + last.left_out} clients` : ""}`);
    draw.waterfall(below, last);
    const seen = new Set(last.spans.map(([name]) => name));
    draw.legend(find("#waterfall .legend"), Object.entries(draw.SPANS).filter(([name]) => seen.has(name))
      .map(([, [colour, words]]) => [colour, words]));
  };

  const showMembers = (s) => {
    const o = s.operator, states = { live: "good", dead: "bad", suspended: "bad", "never joined": "warn", left: "soft" };
    if (o.members) {
      table(find("#members"),
        [["client", "number"], ["state", ""], ["last seen", "number"], ["missed", "number"], ["refused", "number"]],
        o.members.map((m) => [String(m.client), [m.state, states[m.state]],
          m.seen_s === null ? "–" : m.seen_s < 1 ? "now" : `${draw.time(Math.floor(m.seen_s))} ago`,
          o.recent.length ? `${m.missed} of ${o.recent.length}` : "–", String(m.refused)]));
      say(find("#members-note"), o.members_left_out
        ? `${o.members_left_out} more, who are live and answered, are not shown.` : "");
    } else if (!s.ended) say(find("#members-note"), "The parameter server is busy: who is in is not known just now.");
    table(find("#refusals"), [["kind"], ["messages", "number"]],
      o.refusals.length ? o.refusals.map(([kind, count]) => [kind, String(count)]) : [["none so far", ""]]);
    find("#warnings").replaceChildren(...(o.warnings.length ? o.warnings : ["none so far"]).map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }));
  };

  const banner = (text, kind = "") => {
    const box = find("#banner");
    box.hidden = !text;
    box.className = `banner ${kind}`;
    say(box, text);
  };
  const lamp = (text, kind) => { find("#lamp").className = kind; say(find("#lamp"), text); };

  const told = () => {
    const silent = (performance.now() - heardAt) / 1000;
    if (over) {
      const well = state.status === "completed", detail = state.operator?.end || state.message;
      lamp(well ? "completed" : "ended", well ? "good" : "bad");
      banner(`The run has ended: ${state.status}${detail ? ` (${detail})` : ""}.`, well ? "good" : "bad");
    } else if (silent > SILENT_S) {
      lamp("no answer", "bad");
      banner(`The parameter server does not answer since ${Math.floor(silent)} s. What is shown here is from then.`, "bad");
    } else if (state) {
      lamp(state.status === "finishing" ? "finishing" : "live", "good");
      const wait = state.operator?.wait, left = wait ? Math.max(0, wait[1] - silent) : 0;
      if (wait) {
        const rest = ` in ${draw.time(Math.max(1, Math.round(left)))}`, counted = / in [\d.,]+ s$/;
        banner(`Waiting: ${counted.test(wait[0]) ? wait[0].replace(counted, rest) : `${wait[0]} (ends${rest})`}.`);
      }
      else banner(state.status === "finishing" ? "All rounds are done; the final model is being evaluated." : "");
    }
  };

  const show = () => {
    const s = state, o = s.operator;
    document.title = `${s.round}/${s.rounds} · run ${s.run_id}`;
    say(find("#title"), `Run ${s.run_id}`);
    say(find("#about"), `${s.clients} clients, of which ${s.byzantine} may be Byzantine; rule ${s.rule}; ${
      s.parameters.toLocaleString("en")} parameters`);
    find("#bar > div").style.width = `${(100 * s.round) / s.rounds}%`;
    say(find("#part"), operator ? "Operator's part: it shows who answered and how fast; do not publish it."
      : "Public part: it shows what follows from the published models.");
    document.querySelectorAll("[data-part=operator]").forEach((element) => { element.hidden = !o; });
    showTiles(s);
    showCurves(s);
    showPremises(s);
    if (o) {
      showRounds(o);
      showMembers(s);
    }
    told();
  };

  const connect = () => {
    source = new EventSource("events");
    const heard = () => { heardAt = performance.now(); };
    source.addEventListener("alive", () => { heard(); told(); });
    source.addEventListener("state", (event) => {
      heard();
      state = JSON.parse(event.data);
      over = state.ended;
      if (over) source.close();
      show();
    });
    source.addEventListener("error", () => {
      source.close();
      if (!over) setTimeout(connect, AGAIN_MS);
    });
  };

  let width = 0;
  new ResizeObserver(() => {
    const now = find("main").clientWidth;
    if (now !== width && state) show();
    width = now;
  }).observe(find("main"));
  setInterval(told, 1000);
  connect();
})();
