"use strict";
// Helpers, and the parts of a plan. runs.js draws runs and sweeps, and then calls `main`.
const page = JSON.parse(document.getElementById("data").textContent);
const hint = document.querySelector(".hint"), NS = "http://www.w3.org/2000/svg";
const redraws = [];  // what has colours or widths of its own: after a change of theme or size

function el(tag, attrs = {}, ...children) {
  const svg = /^(svg|g|path|line|circle|text|polyline|title)$/.test(tag);
  const made = svg ? document.createElementNS(NS, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attrs))
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value);
  made.append(...children.flat().filter(child => child != null && child !== ""));
  return made;
}
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim() || "#888";
const steps = [["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]];
function short(value, unit = "") {
  if (value == null) return "–";
  const size = Math.abs(value), [prefix, by] = steps.find(([, by]) => size >= by) || ["", 1];
  if (size >= 1e12) return value.toExponential(2) + " " + unit;
  const shown = value / by, digits = Math.abs(shown) >= 100 || (by === 1 && Number.isInteger(value)) ? 0 : 1;
  return (size && size < 1 ? value.toPrecision(3) : shown.toFixed(digits)) + (prefix || unit ? " " : "") + prefix + unit;
}
const bytes = value => value >= 1e12 ? (value / 1e12).toFixed(1) + " TB" : short(value, "B");
const seconds = s => s == null ? "–" : s === 0 ? "0" : Math.abs(s) >= 1 ? s.toFixed(2) + " s"
  : Math.abs(s) >= 1e-3 ? (s * 1e3).toFixed(1) + " ms" : (s * 1e6).toFixed(0) + " us";
const arrow = text => text.replaceAll(" -> ", "\u00a0→ ");
const percent = share => (share * 100).toFixed(share && share < .1 ? 1 : 0) + "%";

function section(title, about = "") {
  const id = title.toLowerCase().replace(/\W+/g, "-");
  document.querySelector("nav").append(el("a", {href: "#" + id}, title));
  const made = el("section", {id}, el("h2", {}, title), about && el("p", {class: "dim"}, about));
  document.querySelector("main").append(made);
  return made;
}
function table(headings, rows, numbers = []) {
  const cell = (tag, k, value) => el(tag, {class: numbers.includes(k) ? "n" : "wrap"}, value instanceof Node ? value : String(value ?? ""));
  return el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "table"}, el("table", {},
    el("thead", {}, el("tr", {}, headings.map((heading, k) => cell("th", k, heading)))),
    el("tbody", {}, rows.map(row => el("tr", {class: row.best ? "best" : null}, row.map((value, k) => cell("td", k, value)))))));
}
const key = (name, text) => el("span", {class: "key", style: `--c: var(--${name})`}, text || name);
const cards = figures => el("div", {class: "cards"}, figures.map(figure => el("div", {class: "card"},
  el("small", {}, figure.name), el("b", {}, figure.foreseen))));
function point(event, text) {  // a hint beside the pointer, inside of the window
  hint.textContent = text;
  const {width, height} = hint.getBoundingClientRect();
  hint.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4)) + "px";
  hint.style.top = (event.clientY + height + 30 > innerHeight ? event.clientY - height - 12 : event.clientY + 16) + "px";
}
const unpoint = () => { hint.textContent = ""; };

// ------------------------------------------------------------------------------- layout
const letter = sbp => sbp[0] === "S" ? "S" + Math.min(3, +sbp.match(/\d+/)[0]) : "BPO".includes(sbp[0]) ? sbp[0] : "B";
const axesOf = sbp => sbp.match(/[SO]\(\d+\)|P\(\w+\)|[BP]|whole/g) || ["B"];
const shownSbp = sbp => el("span", {class: "mono"}, axesOf(sbp).flatMap((each, k) =>
  [k ? " " : "", el("span", {class: "sbp", style: `--c: var(--${letter(each)})`}, each)]));
function folded(list) {  // boxings of [edge, boxing], those of one kind and change in a line
  const groups = new Map(), most = (of, name, show) => {
    const [low, high] = [Math.min, Math.max].map(end => show(end(...of.map(([, boxing]) => boxing[name]))));
    return low === high ? low : `${low} to ${high}`;
  };
  for (const [edge, boxing] of list) {
    const name = `${boxing.what}${boxing.axis && " over " + boxing.axis} ${arrow(boxing.change)}`;
    groups.set(name, [...(groups.get(name) || []), [edge, boxing]]);
  }
  return [...groups].map(([name, of]) => name + (of[0][1].bytes ? `, ${most(of, "bytes", bytes)}, ${most(of, "seconds", seconds)}` : ", moves no byte")
    + (of.reduce((sum, [edge]) => sum + edge.times, 0) > 1 ? `, ${of.reduce((sum, [edge]) => sum + edge.times, 0)} times` : ""));
}

function drawLayout(plan) {
  const made = section("Layout", "What leaves each module, coloured by its SBP: one colour for each axis of ranks. " +
    "A boxing stands above the module that reads: bytes of all ranks and seconds, of one micro-batch. A dashed line leads up, such as to the next block. Open a module for its weights and other phases.");
  made.append(el("p", {class: "tools"}, [["S0", "S(0)"], ["S1", "S(1)"], ["S2", "S(2)"], ["S3", "S(3) …: split"], ["B", "B: whole"],
    ["P", "P: part of a sum"]].map(([name, text]) => key(name, text))));
  const lines = el("svg", {"aria-hidden": "true"}), graph = el("div", {class: "graph"}, lines);
  const into = plan.modules.map(() => []), inside = plan.modules.map(() => []), links = new Map();
  for (const edge of plan.edges) {
    const lists = edge.phase === "forward" ? into : inside;
    for (const boxing of edge.boxings)
      if (boxing.bytes || edge.phase === "forward") lists[edge.target].push([edge, boxing]);
    if (edge.phase !== "forward" || edge.source === edge.target) continue;
    const name = edge.source + " " + edge.target, boxed = edge.boxings.some(each => each.bytes);
    links.set(name, {source: edge.source, target: edge.target, boxed: boxed || (links.get(name) || {}).boxed});
  }
  const nodes = plan.modules.map((module, k) => {
    const depth = Math.min(4, module.path.split(".").length - 1), axes = axesOf(module.sbp).map(letter);
    const bands = axes.map((name, at) => `var(--${name}) ${at / axes.length * 100}% ${(at + 1) / axes.length * 100}%`).join(", ");
    const texts = folded(into[k]);
    const node = el("details", {class: "node", style: `border-image: linear-gradient(${bands}) 1; margin-left: ${depth * 10}px`,
      onmouseenter: () => mark(k), onmouseleave: () => mark(-1), onfocusin: () => mark(k), onfocusout: () => mark(-1)},
      el("summary", {}, el("span", {class: "mono"}, module.path), shownSbp(module.sbp), el("small", {}, module.shape),
        el("small", {}, `stage ${module.stages}` + (module.times > 1 ? `, ${module.times} of them` : ""))),
      module.parameters.length ? table(["weight", "shape", "SBP"], module.parameters.map(([name, shape, sbp]) => [name, shape, shownSbp(sbp)])) : "",
      inside[k].length ? table(["phase", "boxing"], [...new Set(inside[k].map(([edge]) => edge.phase))].flatMap(phase =>
        folded(inside[k].filter(([edge]) => edge.phase === phase)).map(text => [phase.replace("_", " "), text]))) : el("small", {}, "no boxings in other phases"));
    graph.append(...texts.map(text => el("span", {class: "box", style: `margin-left: ${depth * 10}px`}, text)), node);
    return node;
  });
  const paths = [...links.values()].map(link => ({...link, path: el("path", {class: [link.boxed && "boxed", link.target < link.source && "next"].filter(Boolean).join(" ")},
    el("title", {}, `${plan.modules[link.source].path} to ${plan.modules[link.target].path}`))}));
  lines.append(...paths.map(each => each.path));
  const mark = k => paths.forEach(({path, source, target}) => path.classList.toggle("on", k === source || k === target));
  const draw = () => {
    const room = lines.getBoundingClientRect().width - 6, ends = [];
    lines.setAttribute("height", graph.offsetHeight);
    const at = nodes.map(node => node.offsetTop + Math.min(16, node.offsetHeight / 2));
    for (const each of [...paths].sort((a, b) => Math.abs(at[a.target] - at[a.source]) - Math.abs(at[b.target] - at[b.source]))) {
      const [top, end] = [at[each.source] + 3, at[each.target] - 3].sort((a, b) => a - b);
      let lane = ends.findIndex(taken => taken.every(([a, b]) => end <= a + 6 || top >= b - 6));
      if (lane < 0) lane = ends.push([]) - 1;
      ends[lane].push([top, end]);
      const x = Math.max(2, room - 9 - lane * Math.min(11, room / 7)), [from, to] = [at[each.source] + 3, at[each.target] - 3];
      const bend = Math.sign(to - from) * Math.min(8, Math.abs(to - from) / 2);
      each.path.setAttribute("d", `M${room + 4} ${from} H${x + 6} Q${x} ${from} ${x} ${from + bend} V${to - bend} Q${x} ${to} ${x + 6} ${to} H${room + 4} m-5 -3 l5 3 l-5 3`);
    }
  };
  nodes.forEach(node => node.addEventListener("toggle", draw));
  made.append(graph);
  redraws.push(draw);
}

// ----------------------------------------------------------------------------- timeline
const groupOf = actor => ["box", "send", "receive"].includes(actor.kind) ? "message" : ["reader", "copy"].includes(actor.kind) ? "reader" : actor.phase;
const WHY = {input: "for a filled register", credit: "for a free slot", turn: "for its turn among messages", itself: "for its own act before",
  compute: "for the rank, which computed", link: "for the link, which carried"};

function drawTimeline(made, drawing) {
  const {lane, actor, act, start, length, cause, why, tick_s: tick} = drawing, count = lane.length;
  const groups = drawing.actors.map(groupOf), shown = new Set(groups), picks = el("span", {class: "tools"});
  const chain = new Set(drawing.chain), row = 26, canvas = el("canvas", {tabindex: 0, role: "application",
    "aria-label": `${drawing.about}. Arrow keys go from act to act, plus and minus zoom, 0 shows all.`}), said = el("div", {class: "said", "aria-live": "polite"});
  const low = Math.min(0, ...drawing.lanes.map((_, k) => start[lane.indexOf(k)] || 0));
  const high = start.reduce((most, begin, k) => Math.max(most, begin + length[k]), 1);
  let from = low, to = high, chosen = -1, match = () => true, drag = null, chained = false;
  const own = drawing.lanes.map((_, at) => [...lane.keys()].filter(k => lane[k] === at));
  const left = () => canvas.clientWidth < 560 ? 56 : 110, x = time => left() + (time - from) / (to - from) * (canvas.clientWidth - left());
  const low_row = k => groups[actor[k]] === "message" || groups[actor[k]] === "reader";
  const box = k => [x(start[k]), 22 + lane[k] * row + (low_row(k) ? 15 : 0), Math.max(1, length[k] / (to - from) * (canvas.clientWidth - left())), low_row(k) ? 6 : 14];
  function draw() {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = 26 + drawing.lanes.length * row, g = canvas.getContext("2d");
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
    g.scale(ratio, ratio); g.font = "12px system-ui, sans-serif";
    const colours = Object.fromEntries([...new Set(groups)].map(name => [name, colour(name)])), ink = colour("ink"), dim = colour("dim"), paper = colour("paper");
    g.fillStyle = dim; g.strokeStyle = colour("line");
    const least = (to - from) * tick / (width / 90), every = 10 ** Math.floor(Math.log10(least)), gap = every * [1, 2, 5, 10].find(by => by * every >= least);
    for (let t = Math.ceil(from * tick / gap) * gap; t <= to * tick; t += gap) {
      g.beginPath(); g.moveTo(x(t / tick), 16); g.lineTo(x(t / tick), height); g.stroke();
      if (x(t / tick) < width - 40) g.fillText(seconds(Math.abs(t) < gap / 2 ? 0 : t), x(t / tick) + 2, 12);
    }
    drawing.lanes.forEach(([name], k) => { g.fillStyle = ink; g.fillText(left() < 100 ? name.split(",")[0].replace("stage ", "s ").replace("foreseen", "plan").slice(0, 9) : name.slice(0, 18), 0, 34 + k * row); });
    g.save(); g.beginPath(); g.rect(left(), 0, width, height); g.clip();
    let within = 0;
    const edge = new Float64Array(drawing.lanes.length * 2).fill(-1);  // what is under a pixel is drawn once
    for (let k = 0; k < count; k++) {
      if (start[k] > to || start[k] + length[k] < from || !shown.has(groups[actor[k]])) continue;
      const [a, b, wide, tall] = box(k), line = lane[k] * 2 + low_row(k), lit = match(k) && (!chained || chain.has(k));
      within += lit;
      if (lit && wide <= 1 && a < edge[line] + .5) continue;
      if (lit) edge[line] = Math.max(edge[line], a + wide - 1);
      g.globalAlpha = lit ? 1 : .13; g.fillStyle = colours[groups[actor[k]]]; g.fillRect(a, b, wide > 3 ? wide - .5 : wide, tall);
      if (wide > 46 && tall > 10 && g.measureText(drawing.actors[actor[k]].name).width < wide - 4) { g.fillStyle = paper; g.fillText(drawing.actors[actor[k]].name, a + 3, b + 11); }
    }
    g.globalAlpha = 1; g.strokeStyle = ink; g.lineWidth = 2;
    for (let k = chosen, n = 0; k >= 0 && n < 400; k = cause[k], n++) {
      const [a, b, wide, tall] = box(k); g.strokeRect(a, b, wide, tall); g.lineWidth = 1;
      if (cause[k] >= 0) { const [c, d, w, h] = box(cause[k]); g.beginPath(); g.moveTo(c + w, d + h / 2); g.lineTo(a, b + tall / 2); g.stroke(); }
    }
    if (drag) { g.fillStyle = colour("accent"); g.globalAlpha = .2; g.fillRect(Math.min(drag[0], drag[1]), 0, Math.abs(drag[1] - drag[0]), height); }
    g.restore();
    canvas.dataset.acts = within;  // that are shown, and not dimmed
  }
  const register = r => drawing.slots[r] == null ? r : `${r} (${drawing.slots[r] < 0 ? "stash, " : ""}${Math.abs(drawing.slots[r])} slot${Math.abs(drawing.slots[r]) > 1 ? "s" : ""})`;
  function about(k) {
    const who = drawing.actors[actor[k]], lines = [`${who.name} (${who.kind}) on ${drawing.lanes[lane[k]][0]}, micro-batch ${act[k]}`, who.about,
      `${seconds(start[k] * tick)} to ${seconds((start[k] + length[k]) * tick)}: ${seconds(length[k] * tick)}`];
    if (who.reads.length) lines.push("reads register " + who.reads.slice(0, 6).map(register).join(", ") + (who.reads.length > 6 ? " …" : ""));
    if (who.fills.length) lines.push("fills register " + who.fills.slice(0, 6).map(register).join(", ") + (who.fills.length > 6 ? " …" : ""));
    const reason = why[k] < 0 ? "" : drawing.reasons[why[k]], of = cause[k];
    lines.push(!reason ? (start[k] > 0 ? "" : "begins with the step") : `waited ${WHY[reason] || reason}` + (drawing.register[k] < 0 ? "" : ` ${register(drawing.register[k])}`)
      + (of < 0 ? "" : `: ${drawing.actors[actor[of]].name}, ${drawing.lanes[lane[of]][0]}, micro-batch ${act[of]}`));
    return lines.filter(Boolean).join("\n");
  }
  function under(event) {
    const {left: x0, top} = canvas.getBoundingClientRect(), px = event.clientX - x0, py = event.clientY - top;
    for (let k = count - 1; k >= 0; k--) {
      const [a, b, wide, tall] = box(k);
      if (px >= a - 1 && px <= a + wide + 1 && py >= b && py <= b + tall + 1 && px > left() && shown.has(groups[actor[k]])) return k;
    }
    return -1;
  }
  function zoom(by, middle = (from + to) / 2) {
    const wide = Math.min(high - low, Math.max(20, (to - from) * by)), share = (middle - from) / (to - from);
    from = Math.max(low, Math.min(high - wide, middle - share * wide)); to = from + wide; draw();
  }
  const all = () => { from = low; to = high; draw(); };
  function choose(k) {
    chosen = k; said.textContent = k < 0 ? "Point at an act, or go to it with the arrow keys: it says what it waited for." : about(k);
    if (k >= 0 && (start[k] > to || start[k] + length[k] < from)) { const wide = to - from; from = Math.max(low, Math.min(high - wide, start[k] - wide / 4)); to = from + wide; }
    draw();
  }
  function step(by, lanes) {
    if (chosen < 0) return choose(own[0].find(k => start[k] >= from) ?? 0);
    const list = own[Math.max(0, Math.min(drawing.lanes.length - 1, lane[chosen] + lanes))].filter(k => shown.has(groups[actor[k]]) && match(k));
    const at = lanes ? list.findIndex(k => start[k] >= start[chosen]) : list.indexOf(chosen) + by;
    if (list.length) choose(list[Math.max(0, Math.min(list.length - 1, at < 0 ? list.length - 1 : at))]);
  }
  const keys = {ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1), "+": () => zoom(.5),
    "=": () => zoom(.5), "-": () => zoom(2), "0": all, Escape: () => choose(-1)};
  canvas.addEventListener("keydown", event => { if (keys[event.key]) { keys[event.key](); event.preventDefault(); } });
  canvas.addEventListener("pointerdown", event => { drag = [event.offsetX, event.offsetX]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", event => {
    if (drag) { drag[1] = event.offsetX; return draw(); }
    const k = under(event); k < 0 ? unpoint() : point(event, about(k));
  });
  canvas.addEventListener("pointerup", event => {
    const [a, b] = (drag || [0, 0]).sort((p, q) => p - q), time = px => from + Math.max(0, px - left()) / (canvas.clientWidth - left()) * (to - from);
    drag = null;
    if (b - a > 6) { [from, to] = [time(a), Math.max(time(a) + 20, time(b))]; draw(); } else choose(under(event));
  });
  canvas.addEventListener("pointercancel", () => { drag = null; draw(); });
  canvas.addEventListener("pointerleave", unpoint);
  canvas.addEventListener("dblclick", all);
  canvas.addEventListener("wheel", event => { if (event.ctrlKey) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : .8, from + (event.offsetX - left()) / (canvas.clientWidth - left()) * (to - from)); } }, {passive: false});
  const button = (text, does, label) => el("button", {type: "button", onclick: does, "aria-label": label}, text);
  const filter = el("input", {type: "search", placeholder: "name, such as blocks.0", "aria-label": "filter acts", oninput: () => {
    const fits = drawing.actors.map(each => `${each.name} ${each.kind} ${each.about}`.includes(filter.value)); match = k => fits[actor[k]]; draw(); }});
  for (const name of new Set(groups)) picks.append(el("button", {type: "button", class: "pick", "aria-pressed": "true", onclick: event => {
    shown.has(name) ? shown.delete(name) : shown.add(name); event.currentTarget.setAttribute("aria-pressed", shown.has(name)); draw(); }}, key(name, name.replace("_", " "))));
  const only = el("button", {type: "button", "aria-pressed": "false", onclick: () => { chained = !chained; only.setAttribute("aria-pressed", chained); draw(); }}, "longest chain");
  made.append(el("div", {class: "tools"}, button("+", () => zoom(.5), "zoom in"), button("−", () => zoom(2), "zoom out"), button("all", all, "show all"),
    drawing.chain.length ? only : "", filter, picks), canvas, el("p", {class: "dim"}, "Drag across to zoom, double-click for all. Narrow bars are messages and readers."), said);
  choose(-1); redraws.push(draw);
}

// ------------------------------------------------------------- memory, time, communication
const KINDS = {parameter: ["weights", "S0"], buffer: ["buffers", "B"], state: ["optimizer", "S3"], gradient: ["gradients", "S1"], stash: ["stash", "P"],
  other: ["other registers", "O"], message: ["messages that stay", "reader"], messages: ["pages of messages", "update"], work: ["acts under way", "forward"]};
const axis = more => ({stroke: () => colour("dim"), grid: {stroke: () => colour("line"), width: 1}, ticks: {stroke: () => colour("line")}, ...more});

function chart(made, title, data, series, more = {}) {
  const home = el("div", {role: "group", "aria-label": `curves of ${title}`}), heading = el("h3", {}, title); made.append(el("div", {}, heading, home));
  const drawn = new uPlot({width: Math.max(260, home.clientWidth), height: 230, series, scales: {x: {time: false}}, cursor: {y: false},
    axes: [axis({space: 66, values: (_, at) => at.map(more.x || (v => short(v)))}), axis({size: 74, values: (_, at) => at.map(v => v == null ? "" : (more.y || short)(v))})], ...more.options}, data, home);
  redraws.push(() => { if (drawn.status) { drawn.setSize({width: Math.max(260, home.parentNode.clientWidth), height: 230}); drawn.redraw(true, true); } });
  return drawn;
}
function drawMemory(made, stage, end) {
  const kinds = Object.keys(KINDS).filter(kind => stage.memory[kind]), parts = stage.memory[kinds[0]].length;
  const times = Array.from({length: parts}, (_, k) => (k + .5) / parts * end), sums = [];
  kinds.forEach((kind, k) => sums.push(stage.memory[kind].map((value, at) => value + (k ? sums[k - 1][at] : 0))));
  const flat = value => times.map(() => value);
  const line = (label, value) => ({label, stroke: () => colour("ink"), dash: [6, 4], width: 1, points: {show: false}, value: () => bytes(value)});
  const layers = kinds.map(kind => ({label: KINDS[kind][0], fill: () => colour(KINDS[kind][1]), stroke: () => colour(KINDS[kind][1]), width: 0, points: {show: false},
    value: (_, __, ___, at) => at == null ? bytes(Math.max(...stage.memory[kind])) + " at most" : bytes(stage.memory[kind][at])}));
  chart(made, `a rank of stage ${stage.stages}`, [times, ...sums.reverse(), flat(stage.peak_bytes), flat(stage.bound_bytes)],
    [{label: "time", value: (_, t) => t == null ? "" : seconds(t)}, ...layers.reverse(), line("most foreseen", stage.peak_bytes), line("at most", stage.bound_bytes)],
    {x: seconds, y: bytes, options: {scales: {x: {time: false}, y: {range: (_, __, most) => [0, Math.max(most, stage.bound_bytes) * 1.05]}}}});
}
const bars = (rows, total) => el("div", {class: "bars"}, rows.map(([name, parts, text]) => el("div", {}, el("span", {}, name),
  el("div", {class: "bar", role: "img", "aria-label": parts.map(([kind, value]) => `${kind} ${percent(value / total)}`).join(", ")},
    parts.map(([kind, value]) => el("i", {style: `width: ${value / total * 100}%; --c: var(--${kind})`, title: `${kind} ${seconds(value)}`}))), el("span", {class: "dim"}, text))));

function drawPlan(plan) {
  section("What it will do").append(cards(plan.figures), ...plan.notes.map(note => el("p", {}, "note: " + note)));
  const total = plan.bounds.reduce((sum, [, spent]) => sum + spent, 0), named = name => name.startsWith("compute") ? name.split(", ")[1] : name.startsWith("samples") ? "reader" : "message";
  const bound = section("What bounds the step", "The longest chain of acts in the first step, each of which waited for the one before: to shorten the step, shorten these.");
  bound.append(bars(plan.bounds.slice(0, 10).map(([name, spent]) => [arrow(name.replace("_", " ")), [[named(name), spent]], `${seconds(spent)}, ${percent(spent / total)}`]), total));
  bound.append(el("h3", {}, "What a rank of each stage does meanwhile"), bars(plan.stages.map(stage => [`stage ${stage.stages}`, [...Object.entries(stage.seconds),
    ["message", stage.exposed_s], ["idle", stage.idle_s]], `computes ${percent(1 - (stage.exposed_s + stage.idle_s) / total)}, waits for messages ${percent(stage.exposed_s / total)}`]), total));
  bound.append(table(["stage", "ranks", "modules"], plan.stages.map(stage => [stage.stages, stage.ranks, stage.modules])));
  drawLayout(plan);
  drawTimeline(section("Timeline", plan.drawing.about), plan.drawing);
  const memory = el("div", {class: "grid"});
  section("Memory", "The first step, at the fullest moment of each 1/240 of it. Dashed: the most of any step as foreseen, and with every stash full.").append(memory);
  plan.stages.forEach(stage => drawMemory(memory, stage, total));
  const traffic = section("Communication", "Of a step. Exposed: while a rank of the stage computes nothing. Seconds are sums over stages.");
  const axes = [...new Set(plan.traffic.map(each => each.axis))], sum = (list, name) => list.reduce((all, each) => all + each[name], 0);
  traffic.append(plan.traffic.length ? table(["axis", "phase", "what", "times", "bytes", "seconds", "exposed"], axes.flatMap(name => {
    const own = plan.traffic.filter(each => each.axis === name).sort((a, b) => b.bytes - a.bytes);
    const row = (first, phase, what, list) => [first, phase, what, sum(list, "times"), bytes(sum(list, "bytes")), seconds(sum(list, "seconds")), seconds(sum(list, "exposed_s"))];
    return [row(el("b", {}, name), "", el("b", {}, "all"), own), ...own.map(each => row("", each.phase.replace("_", " "), arrow(each.what), [each]))];
  }), [3, 4, 5, 6]) : el("p", {}, "No byte travels between ranks."));
  section("Recipe").append(el("details", {}, el("summary", {}, "all keys"), el("pre", {tabindex: 0}, plan.recipe)));
}

function draw() {
  document.querySelector("main").replaceChildren();
  document.querySelector("nav").replaceChildren();
  redraws.splice(0);
  document.title = document.querySelector("h1").textContent = page.title;
  document.getElementById("made").textContent = `Made by flowrun ${page.made_by}. The data of this page is JSON inside of it.`;
  if (page.plan) drawPlan(page.plan);
  if (page.sweep) drawSweep(page.sweep);
  if (page.runs.length) drawRuns(page.runs);
}

function main() {
  draw();
  const again = () => redraws.forEach(each => each());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  let wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; again(); } });
  setTimeout(() => { again(); document.body.dataset.drawn = "yes"; });  // when all have their places
}
