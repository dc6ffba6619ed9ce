// The parts of runs and of a sweep.
const COLOURS = ["#2f7fe0", "#d9642a", "#3f9a3a", "#8a5fd0", "#12968a", "#c2478c", "#a88414", "#7a8791", "#dc4a40", "#36a8dc"];
const labels = runs => { if (page.sweep) return runs.map(run => "job " + run.folder.split("/").pop()); const last = runs.map(run => run.folder.replace(/\/+$/, "").split("/").pop()); return new Set(last).size === last.length ? last : runs.map(run => run.folder); };
const FIRST = ["loss", "accuracy", "step_s", "tokens_per_s", "lr", "grad_norm"], plain = v => v == null ? "–" : Math.abs(v) >= 1e4 ? short(v) : String(+v.toPrecision(4));
const unitOf = name => name.endsWith("per_s") ? plain : name.endsWith("_s") ? seconds : name.endsWith("_bytes") ? bytes : plain;

function drawRuns(runs) {
  const names = labels(runs), made = section(runs.length > 1 ? "Runs" : "The run");
  if (runs.length === 1) made.append(el("p", {class: "dim wrap"}, runs[0].folder), el("div", {class: "cards"}, runs[0].figures.filter(each => each.measured || each.foreseen).map(each =>
    el("div", {class: "card"}, el("small", {}, each.name), el("b", {}, each.measured || each.foreseen), each.measured && each.foreseen ? el("small", {}, `foreseen ${each.foreseen}`) : ""))));
  else {
    const heads = [...new Set(runs.flatMap(run => run.figures.map(each => each.name)))];
    made.append(table(["run", ...heads], runs.map((run, k) => [el("span", {class: "key", style: `--c: ${COLOURS[k % COLOURS.length]}`}, names[k]), ...heads.map(head => {
      const found = run.figures.find(each => each.name === head) || {};
      return el("span", {}, found.measured || "", found.foreseen ? el("small", {}, ` foreseen ${found.foreseen}`) : ""); })]), heads.map((_, k) => k + 1)));
  }
  runs.forEach((run, k) => [...run.restarts.map(([, text]) => text), ...run.notes].forEach(text => made.append(el("p", {}, (runs.length > 1 ? names[k] + ": " : "") + text))));
  drawCurves(section("Curves", "Drag across to zoom, double-click for all. Dots are evaluations, dashed upright lines restarts of ranks. The title names the curve under the pointer."), runs, names);
  const keys = [...new Set(runs.flatMap(run => Object.keys(run.keys)))], differ = keys.filter(key => new Set(runs.map(run => run.keys[key])).size > 1);
  const recipes = section(runs.length > 1 && !page.sweep ? "Differences of recipes" : "Recipe");
  if (runs.length > 1 && !page.sweep) recipes.append(differ.length ? table(["key", ...names], differ.map(key => [key, ...runs.map(run => run.keys[key] ?? "–")])) : el("p", {}, "The recipes are the same."));
  recipes.append(el("details", {}, el("summary", {}, `all keys of ${names[0]}`), el("pre", {tabindex: 0}, Object.entries(runs[0].keys).map(([key, value]) => `${key}=${value}`).join("\n"))));
  runs.forEach((run, k) => { if (run.drawing) drawTimeline(section(runs.length > 1 ? `Traced step of ${names[k]}` : "Traced step", run.drawing.about), run.drawing); });
  const written = runs.flatMap((run, k) => run.samples.map(([step, prompt, text]) => [names[k], step, prompt, text]));
  if (written.length) section("Texts").append(...written.map(([name, step, prompt, text]) => el("div", {}, el("h3", {}, `${name}, after ${step} steps`), el("pre", {tabindex: 0}, el("span", {class: "dim"}, prompt), text))));
  const unlike = run => JSON.stringify({...run.environment, started: ""}), kinds = runs.map((run, k) => k).filter(k => runs.findIndex(run => unlike(run) === unlike(runs[k])) === k);
  const about = [...new Set(runs.flatMap(run => Object.keys(run.environment)))];
  if (about.length) section("Environment").append(table(["", ...kinds.map(k => kinds.length > 1 ? names[k] : runs.length > 1 ? "all" : "")], about.map(name => [name, ...kinds.map(k => runs[k].environment[name] ?? "")])));
}

function drawCurves(made, runs, names) {
  const charts = el("div", {class: "grid"}), base = tag => tag.replace(/^(validation|foreseen)\//, "");
  const axisOf = el("select", {"aria-label": "axis", onchange: () => again()}, el("option", {value: "step"}, "over steps"), el("option", {value: "time"}, "over time"));
  const log = el("button", {type: "button", "aria-pressed": "false", onclick: () => { log.setAttribute("aria-pressed", log.getAttribute("aria-pressed") !== "true"); again(); }}, "logarithmic");
  const tags = [...new Set(runs.flatMap(run => run.curves.map(curve => base(curve.tag))))].filter(tag => tag !== "elapsed_s");
  tags.sort((a, b) => (FIRST.indexOf(a) + 1 || 99) - (FIRST.indexOf(b) + 1 || 99));
  const timeOf = (run, step) => {  // seconds of steps until the end of this one
    const curve = run.curves.find(each => each.tag === "elapsed_s");
    if (!curve) return step;
    const at = curve.steps.findIndex(each => each >= step), k = at < 0 ? curve.steps.length - 1 : at, [s0, s1] = [curve.steps[Math.max(0, k - 1)], curve.steps[k]];
    return s1 === s0 ? curve.values[k] : curve.values[k - 1] + (curve.values[k] - curve.values[k - 1]) * (step - s0) / (s1 - s0);
  };
  function again() {
    charts.replaceChildren(); redraws.splice(first);
    const timed = axisOf.value === "time", x = (run, step) => timed ? timeOf(run, step) : step, show = timed ? seconds : v => String(v);
    for (const tag of tags) {
      const series = [], tables = [], unit = unitOf(tag);
      runs.forEach((run, k) => run.curves.filter(curve => base(curve.tag) === tag).forEach(curve => {
        const stroke = COLOURS[k % COLOURS.length], kind = curve.tag.split("/")[0], name = runs.length > 1 ? names[k] + " " : "";
        const given = curve.steps.map((step, at) => [x(run, step), curve.values[at]]).sort((a, b) => a[0] - b[0]);
        tables.push([given.map(each => each[0]), given.map(each => each[1])]);
        const look = curve.tag === tag ? {width: 1.5, points: {show: curve.steps.length < 3}} : kind === "foreseen" ? {dash: [7, 4], points: {show: false}}
          : {width: 1, points: {show: true, size: 7, fill: stroke}, dash: [2, 3]};
        series.push({label: name + (curve.tag === tag ? tag : kind), stroke, spanGaps: true, value: (_, v) => unit(v), ...look});
      }));
      const marks = plot => runs.forEach((run, k) => run.restarts.forEach(([step]) => {
        const at = plot.valToPos(x(run, step), "x", true), {ctx, bbox} = plot;
        ctx.save(); ctx.strokeStyle = COLOURS[k % COLOURS.length]; ctx.setLineDash([6, 6]); ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke(); ctx.restore();
      }));
      const named = plot => {
        const {idx, top} = plot.cursor, far = k => idx == null || plot.data[k][idx] == null ? 25 : Math.abs(plot.valToPos(plot.data[k][idx], "y") - top);
        const near = series.map((_, k) => k + 1).sort((a, b) => far(a) - far(b))[0];
        plot.root.parentNode.previousSibling.textContent = far(near) < 25 ? `${tag}: ${plot.series[near].label} ${unit(plot.data[near][idx])}` : tag;
      };
      const whole = log.getAttribute("aria-pressed") === "true" && tables.every(([, values]) => values.every(v => v == null || v > 0));
      chart(charts, tag, uPlot.join(tables), [{label: timed ? "time" : "step", value: (_, v) => v == null ? "" : show(v)}, ...series],
        {x: show, y: unit, options: {scales: {x: {time: false}, y: {distr: whole ? 3 : 1}}, hooks: {draw: [marks], setCursor: [named]}, legend: {show: runs.length < 5}}});
    }
    setTimeout(() => redraws.slice(first).forEach(each => each()));
  }
  const first = redraws.length;
  made.append(el("div", {class: "tools"}, axisOf, log), charts);
  again();
}

// -------------------------------------------------------------------------------- sweep
function drawSweep(sweep) {
  const made = section("Sweep", "Each line and dot is a job that ran; point at it, or at its row."), home = el("div", {});
  const ran = () => sweep.rows.filter(row => row[metric.value] != null && Object.values(row).join(" ").includes(filter.value));
  const option = name => el("option", {selected: name === sweep.objective}, name), filled = name => sweep.rows.some(row => typeof row[name] === "number");
  const metric = el("select", {"aria-label": "number", onchange: () => draw()}, sweep.numbers.filter(filled).map(option));
  const side = el("select", {"aria-label": "best", onchange: () => draw()}, el("option", {value: ""}, "lowest is best"), el("option", {value: "high", selected: sweep.highest}, "highest is best"));
  const filter = el("input", {type: "search", "aria-label": "filter jobs", placeholder: "filter", oninput: () => draw()});
  function scale(name, low, high) {  // a key or number -> a place; words in the order of their coming
    const values = sweep.rows.map(row => row[name]).filter(value => value != null), numbers = values.every(value => typeof value === "number");
    const words = [...new Set(values)].sort((a, b) => numbers ? a - b : 0), [least, most] = [Math.min(...values), Math.max(...values)];
    const log = numbers && words.length > 2 && least > 0 && most / least >= 10, to = value => log ? Math.log(value) : value;
    const place = value => !numbers ? (words.indexOf(value) + .5) / words.length : most === least ? .5 : (to(value) - to(least)) / (to(most) - to(least));
    const marks = words.length > 6 ? [least, most] : words;
    return {at: value => low + (high - low) * place(value), marks, show: value => typeof value === "number" ? String(+value.toPrecision(4)) : String(value)};
  }
  function draw() {
    const rows = ran(), sign = side.value ? -1 : 1, order = [...rows].sort((a, b) => sign * (a[metric.value] - b[metric.value])), best = order[0];
    const place = new Map(order.map((row, k) => [row, order.length > 1 ? k / (order.length - 1) : 0])), tone = row => `color-mix(in srgb, ${colour("S0")} ${Math.round(100 - place.get(row) * 100)}%, ${colour("P")})`;
    const all = [], mark = row => all.forEach(([each, of]) => { each.classList.toggle("on", of === row); each.classList.toggle("off", row != null && of !== row); });
    const textOfJob = row => [...sweep.keys, metric.value].map(name => `${name} = ${row[name] ?? "–"}`).join("\n");
    const watched = (node, row) => { all.push([node, row]); node.addEventListener("pointermove", event => { mark(row); point(event, textOfJob(row)); }); node.addEventListener("pointerleave", () => { mark(null); unpoint(); }); return node; };
    const width = Math.max(300, made.clientWidth), names = [...sweep.keys.filter(key => new Set(sweep.rows.map(row => row[key])).size > 1), metric.value];
    const lines = el("svg", {viewBox: `0 0 ${width} 240`, width: "100%", height: 240, role: "img", "aria-label": "parallel coordinates of all jobs"});
    const at = names.map((_, k) => 46 + k * (width - 120) / Math.max(1, names.length - 1)), scales = names.map(name => scale(name, 205, 34));
    order.slice().reverse().forEach(row => lines.append(watched(el("polyline", {class: "run", style: `--c: ${tone(row)}`, points: names.map((name, k) => row[name] == null ? "" : `${at[k]},${scales[k].at(row[name])}`).join(" ")}), row)));
    names.forEach((name, k) => { const last = k === names.length - 1; lines.append(el("line", {class: "axis", x1: at[k], x2: at[k], y1: 34, y2: 205}), el("text", {x: at[k], y: k % 2 && width < 150 * names.length ? 28 : 12, "text-anchor": last ? "end" : k ? "middle" : "start", "font-weight": 600}, name),
      ...scales[k].marks.map(value => el("text", {x: at[k] + 5, y: scales[k].at(value) + 4}, scales[k].show(value)))); });
    const dots = names.slice(0, -1).map(name => {
      const x = scale(name, 60, 400), y = scale(metric.value, 150, 14), svg = el("svg", {viewBox: "0 0 430 190", width: "100%", style: "max-width: 480px", role: "img", "aria-label": `${metric.value} against ${name}`});
      svg.append(el("line", {class: "axis", x1: 50, x2: 420, y1: 160, y2: 160}), el("line", {class: "axis", x1: 50, x2: 50, y1: 6, y2: 160}), ...x.marks.map(value => el("text", {x: x.at(value), y: 175, "text-anchor": "middle"}, x.show(value))),
        ...y.marks.slice(0, 1).concat(y.marks.slice(-1)).map(value => el("text", {x: 46, y: y.at(value) + 4, "text-anchor": "end"}, y.show(value))));
      rows.forEach(row => svg.append(watched(el("circle", {class: "dot", r: row === best ? 6 : 4, cx: x.at(row[name]), cy: y.at(row[metric.value]), style: `--c: ${tone(row)}`}), row)));
      return el("div", {}, el("h3", {}, `${metric.value} against ${name}`), svg);
    });
    const shown = ["job", ...sweep.keys, "status", ...sweep.numbers.filter(filled)], left = sweep.rows.filter(row => !rows.includes(row) && !filter.value);
    const list = table(shown, [...order, ...left].map(row => Object.assign(shown.map(name => name === "status" && row.reason ? `${row.status}: ${row.reason}` : typeof row[name] === "number" ? unitOf(name)(row[name]) : row[name]), {best: row === best})),
      shown.map((name, k) => sweep.numbers.includes(name) ? k : -1));
    home.replaceChildren(best ? el("p", {}, el("b", {}, `best: job ${best.job}, ${metric.value} ${unitOf(metric.value)(best[metric.value])}`), ` (${sweep.keys.map(key => `${key}=${best[key]}`).join(" ")})`) : el("p", {}, "No job has this number."), lines, el("div", {class: "grid"}, dots), list);
    list.querySelectorAll("tbody tr").forEach((line, k) => { const row = order[k]; if (row) { line.addEventListener("mouseenter", () => mark(row)); line.addEventListener("mouseleave", () => mark(null)); } });
  }
  made.append(el("div", {class: "tools"}, metric, side, filter), home);
  redraws.push(draw);
}

main();
