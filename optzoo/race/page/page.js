"use strict";
// The figures of the page. All names in the data are text: they are never read as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const DARK = matchMedia("(prefers-color-scheme: dark)");
const COARSE = matchMedia("(pointer: coarse)").matches;
const BANDS = 4; // with more lines than this the bands of the seeds would hide the lines,
const BARS = 8; // and with more than this the bars
const state = { axis: "steps", x: false, y: true, off: new Set(), isolated: null };

const family = new Map(DATA.optimizers.map(o => [o.name, o.family]));
const hue = new Map(DATA.families.map(f => [f.name, f.hue]));
const place = new Map();
for (const { name } of DATA.families)
  DATA.optimizers.filter(o => o.family === name).forEach((o, i) => place.set(o.name, i));

// ------------------------------------------------------------------------------- the looks
const escaped = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const title = names => escaped(names.join(" = "));
const brief = names => {
  const first = names[0].length > 29 ? names[0].slice(0, 28) + "…" : names[0];
  return escaped(names.length > 1 ? `${first} +${names.length - 1}` : first);
};
const colour = names => {
  const levels = DARK.matches ? [68, 56, 80, 48] : [40, 52, 30, 62];
  return `hsl(${hue.get(family.get(names[0]))}, 75%, ${levels[place.get(names[0]) % 4]}%)`;
};
// With four colours, 24 lines of a family can be told apart.
const DASHES = ["solid", "9px,5px", "2px,3px", "9px,4px,2px,4px", "18px,5px", "18px,4px,2px,4px,2px,4px"];
const dash = names => DASHES[(place.get(names[0]) >> 2) % DASHES.length];
const number = value => (value == null ? "–" : String(Number(value.toPrecision(4))));

const isOn = names => names.some(name => !state.off.has(name));
const isBright = names =>
  isOn(names) && (!state.isolated || names.some(name => state.isolated.includes(name)));

function layout(x, y, more = {}) {
  const text = DARK.matches ? "#e6e9ed" : "#1c2024", grid = DARK.matches ? "#2c323a" : "#e4e7eb";
  const axis = { gridcolor: grid, linecolor: grid, zeroline: false, automargin: true };
  return {
    font: { color: text, size: 12 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 45, r: 12, t: 8, b: 40 }, showlegend: false, hovermode: "closest",
    hoverlabel: { namelength: -1 }, dragmode: COARSE ? false : "zoom", uirevision: "same",
    xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y }, ...more,
  };
}

// Labels of a log axis: equal steps within a decade; in more the digits 1, 2, 5, or 1, 3, or powers
// of ten, whichever have 50 pixels from each to the next.
function logTicks(low, high, room) {
  if (!(high > low)) return {};
  const decades = Math.log10(high / low), most = room / 50;
  if (decades >= 1) {
    if (decades / 0.3 < most) return { dtick: "D2" };
    if (decades / 0.47 > most) return { dtick: Math.ceil(decades / most) };
    const first = Math.floor(Math.log10(low)), powers = Array.from({ length: decades + 2 }, (_, i) => first + i);
    return { tickvals: powers.flatMap(power => [Number(`1e${power}`), Number(`3e${power}`)]) };
  }
  const step = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(step));
  return { dtick: `L${unit * [1, 2, 5, 10].find(n => n * unit >= step)}` };
}
const log = range => (range[0] > 0 ? range.map(Math.log10) : null);
function lossAxis(problem) {
  const [low, high] = problem.range;
  if (state.y) {
    const ends = [low * 0.9, high * 1.1], range = log(ends);
    return {
      type: "log", title: { text: "loss" }, tickformat: "~g",
      ...(range && { range, ...logTicks(...ends, 400) }),
    };
  }
  const margin = 0.04 * (high - low || 1);
  return { type: "linear", title: { text: "loss" }, range: [low - margin, high + margin] };
}

// ----------------------------------------------------------------------------- the figures
function curves(lines, points, more) {
  // Lines come best first. What is drawn later hides what is below: dim lines are drawn first, the
  // best one last.
  const bright = lines.filter(line => isBright(line.names));
  const dim = lines.filter(line => isOn(line.names) && !isBright(line.names));
  const trace = isDim => line => ({
    type: "scatter", mode: "lines", name: title(line.names), meta: line.names,
    opacity: isDim ? 0.1 : 1, hoverinfo: isDim ? "skip" : undefined,
    line: { color: colour(line.names), dash: dash(line.names), width: bright.length < 9 ? 2.4 : 1.4 },
    ...points(line), ...(isDim ? {} : more?.(line, bright.length)),
  });
  return [...dim.map(trace(true)).reverse(), ...bright.map(trace(false)).reverse()];
}

const unit = line => (state.axis === "steps" ? 1 : line.seconds);
const axisTitle = () => (state.axis === "steps" ? "step" : "seconds");

const FIGURES = {
  loss(problem, width) {
    const at = line => line.steps.map(step => step * unit(line));
    const traces = curves(problem.lines, line => ({
      x: at(line), y: line.mean,
      hovertemplate: `<b>%{fullData.name}</b><br>rate ${number(line.rate)}<br>` +
        `${axisTitle()} %{x:.4~g}, loss %{y:.4~g}<extra></extra>`,
    }));
    const bright = problem.lines.filter(line => isBright(line.names));
    const bands = bright.length > BANDS ? [] : bright.map(line => {
      const kept = line.steps.map((_, i) => i).filter(i => line.low[i] != null && line.high[i] != null);
      const x = kept.map(i => at(line)[i]);
      return {
        type: "scatter", mode: "lines", fill: "toself", hoverinfo: "skip", line: { width: 0 },
        fillcolor: colour(line.names), opacity: 0.18, meta: [],
        x: [...x, ...[...x].reverse()],
        y: [...kept.map(i => line.high[i]), ...kept.map(i => line.low[i]).reverse()],
      };
    });
    const x = { title: { text: axisTitle() }, type: state.x ? "log" : "linear", tickformat: "~g" };
    const ends = traces.flatMap(t => t.x.filter(v => v > 0));
    if (state.x && ends.length) Object.assign(x, logTicks(Math.min(...ends), Math.max(...ends), width - 60));
    return [[...bands, ...traces], layout(x, lossAxis(problem))];
  },

  rates(problem) {
    const top = problem.range[1];
    const traces = curves(problem.lines, line => ({
      mode: "lines+markers",
      x: line.rates.map(r => r.rate),
      y: line.rates.map(r => r.mean ?? top),
      marker: {
        size: 5, color: colour(line.names),
        symbol: line.rates.map(r => (r.mean == null ? "x" : "circle")),
      },
      text: line.rates.map(r => r.mean == null
        ? `${r.diverged} of ${line.seeds} seeds diverged`
        : `loss ${number(r.mean)} (${number(r.low)} to ${number(r.high)})`),
      hovertemplate: "<b>%{fullData.name}</b><br>rate %{x:.3g}<br>%{text}<extra></extra>",
    }), (line, count) => count > BARS ? {} : {
      error_y: {
        type: "data", symmetric: false, thickness: 1.2, width: 3, color: colour(line.names),
        array: line.rates.map(r => (r.mean == null ? 0 : (r.high ?? r.mean) - r.mean)),
        arrayminus: line.rates.map(r => (r.mean == null ? 0 : r.mean - r.low)),
      },
    });
    return [traces, layout({ title: { text: "learning rate" }, type: "log", tickformat: "~g" }, lossAxis(problem))];
  },

  target(problem, width) {
    const rows = problem.lines.filter(line => line.reached.length).map(line => {
      const mean = line.reached.reduce((a, b) => a + b) / line.reached.length;
      const [low, high] = [Math.min(...line.reached), Math.max(...line.reached)];
      const isTime = state.axis === "seconds", all = line.reached.length === line.seeds;
      return {
        names: line.names, is_whole: all, mean: mean * unit(line),
        low: low * (isTime ? line["seconds from"] : 1),
        high: high * (isTime ? line["seconds to"] : 1),
        text: all ? "" : `<br>reached by ${line.reached.length} of ${line.seeds} seeds`,
      };
    });
    // Those that some seeds did not reach are behind all others.
    rows.sort((a, b) => b.is_whole - a.is_whole || a.mean - b.mean);
    const name = state.axis === "steps" ? "steps to the target" : "seconds to the target";
    return dots(rows, name, state.x, width);
  },

  ranks: () => dots(DATA.ranks.map(row => ({ ...row, is_whole: true, text: "" })), "mean rank", false),

  profile(_, width) {
    const rows = DATA.profile[state.axis];
    const end = Math.max(2, ...rows.flatMap(row => row.ratios)) * 1.1;
    const traces = curves(rows, row => ({
      x: [1, ...row.ratios, end],
      y: [0, ...row.ratios.map((_, i) => (i + 1) / row.runs), row.ratios.length / row.runs],
      line: { color: colour(row.names), dash: dash(row.names), width: 1.8, shape: "hv" },
      hovertemplate: "<b>%{fullData.name}</b><br>%{y:.0%} of the runs within %{x:.3g} times the " +
        `smallest ${state.axis}<extra></extra>`,
    }));
    const about = rows.length ? [] : [{
      text: "no run reached a target", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5,
    }];
    const x = {
      type: "log", title: { text: `${state.axis}, relative to the smallest` },
      tickformat: "~g", ...logTicks(1, end, width - 60),
    };
    return [traces, layout({ ...x, range: [0, Math.log10(end)] },
      { tickformat: ".0%", range: [0, 1.02] }, { annotations: about })];
  },
};

function dots(rows, name, isLog, width) {
  const on = rows.filter(row => isOn(row.names));
  const labels = on.map(row => brief(row.names));
  const color = on.map(row => (isBright(row.names) ? colour(row.names) : "rgba(128,128,128,0.25)"));
  const trace = {
    type: "scatter", mode: "markers", x: on.map(row => row.mean), y: on.map((_, i) => i),
    customdata: on.map(row => row.names),
    text: on.map(row => `<b>${title(row.names)}</b><br>${number(row.mean)} ` +
      `(${number(row.low)} to ${number(row.high)})${row.text}`),
    hovertemplate: "%{text}<extra></extra>",
    marker: { size: 9, color, symbol: on.map(row => (row.is_whole ? "circle" : "circle-open")) },
    error_x: {
      type: "data", symmetric: false, thickness: 1.4, width: 0, color: "rgba(128,128,128,0.7)",
      array: on.map(row => row.high - row.mean), arrayminus: on.map(row => row.mean - row.low),
    },
  };
  const y = { tickvals: on.map((_, i) => i), ticktext: labels, range: [on.length - 0.4, -0.6] };
  const x = { title: { text: name }, type: isLog ? "log" : "linear", tickformat: "~g" };
  const ends = on.flatMap(row => [row.low, row.high]).filter(v => v > 0);
  if (isLog) Object.assign(x, logTicks(Math.min(...ends), Math.max(...ends), width - 230));
  const about = on.length ? [] : [{
    text: "none", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5,
  }];
  return [[trace], layout(x, y, { height: dotsHeight(on.length), annotations: about })];
}
const dotsHeight = number => Math.max(220, 70 + 17 * number);

// ------------------------------------------------------------------------- drawing, clicks
const plots = [...document.querySelectorAll(".plot")], near = new Set(), stale = new Set(plots);

function draw(div) {
  stale.delete(div);
  const [traces, plan] = FIGURES[div.dataset.kind](DATA.problems[div.dataset.problem], div.clientWidth);
  const isFirst = !div.layout;
  // The user's zoom holds until the axes change.
  plan.uirevision = [state.axis, state.x, state.y].join();
  Plotly.react(div, traces, plan, {
    responsive: true, displayModeBar: false, doubleClick: COARSE ? false : "reset",
  });
  if (!isFirst) return;
  div.on("plotly_click", event => {
    const [point] = event.points;
    isolate(point.customdata ?? point.data.meta);
  });
  // Otherwise the browser sends mouse events after those of a tap: a second click, and one that
  // removes the label of the point.
  div.addEventListener("touchend", event => event.cancelable && event.preventDefault());
}

// The names of the lines of a figure, best first, each beside a piece of its line.
function legend(box) {
  const lines = box.dataset.problem ? DATA.problems[box.dataset.problem].lines : DATA.profile[state.axis];
  box.replaceChildren(...lines.filter(line => isOn(line.names)).map(({ names }) => {
    const entry = document.createElement("button");
    entry.append(swatch(names), names.join(" = "));
    entry.classList.toggle("dim", !isBright(names));
    entry.addEventListener("click", () => isolate(names));
    return entry;
  }));
}

function swatch(names) {
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const picture = svg("svg", { width: 36, height: 10, "aria-hidden": true });
  picture.append(svg("line", {
    x2: 36, y1: 5, y2: 5, stroke: colour(names), "stroke-width": 2.4,
    "stroke-dasharray": dash(names) === "solid" ? "none" : dash(names),
  }));
  return picture;
}

function drawAll() {
  document.querySelectorAll(".legend").forEach(legend);
  for (const div of plots) near.has(div) ? draw(div) : stale.add(div);
}

function isolate(names) {
  if (!names?.length) return;
  state.isolated = String(state.isolated) === String(names) ? null : names;
  show();
}

const on = (selector, act) => document.querySelectorAll(selector).forEach(element =>
  element.addEventListener("click", () => { act(element); show(); }));
const press = (selector, isPressed) => document.querySelectorAll(selector).forEach(element =>
  element.setAttribute("aria-pressed", isPressed(element)));

function chips(id, list, names) {
  for (const each of list) {
    const button = document.createElement("button");
    button.className = "chip";
    button.dataset.name = each.name;
    button.textContent = each.name;
    button.style.setProperty("--hue", `hsl(${hue.get(each.family ?? each.name)}, 70%, 52%)`);
    button.addEventListener("click", () => {
      const mine = names(each), isAny = mine.some(name => !state.off.has(name));
      for (const name of mine) isAny ? state.off.add(name) : state.off.delete(name);
      state.isolated = null;
      show();
    });
    document.getElementById(id).append(button);
  }
}
const members = f => DATA.optimizers.filter(o => o.family === f.name).map(o => o.name);
chips("families", DATA.families, members);
chips("optimizers", DATA.optimizers, o => [o.name]);

function show() {
  press("[data-axis]", e => e.dataset.axis === state.axis);
  press("[data-log]", e => state[e.dataset.log]);
  press("#families .chip", e => members({ name: e.dataset.name }).some(name => !state.off.has(name)));
  press("#optimizers .chip", e => !state.off.has(e.dataset.name));
  const isolated = document.getElementById("isolated");
  isolated.hidden = !state.isolated;
  isolated.textContent = state.isolated ? `× ${state.isolated.join(" = ")}` : "";
  for (const row of document.querySelectorAll("tbody tr[data-name]")) {
    row.hidden = !isBright([row.dataset.name]);
  }
  drawAll();
}

on("[data-axis]", e => { state.axis = e.dataset.axis; state.x = state.axis === "seconds"; });
on("[data-log]", e => { state[e.dataset.log] = !state[e.dataset.log]; });
on("[data-all]", e => {
  state.isolated = null;
  state.off = new Set(e.dataset.all === "on" ? [] : family.keys());
});
on("#isolated", () => { state.isolated = null; });

// A click on a heading sorts the table by its column; cells without a number come last.
for (const button of document.querySelectorAll("thead button")) button.addEventListener("click", () => {
  const body = button.closest("table").tBodies[0], column = button.parentNode.cellIndex;
  const text = row => row.cells[column].textContent;
  const value = row => parseFloat(text(row).replaceAll(",", ""));
  const sign = button.dataset.up === "1" ? -1 : 1;
  button.dataset.up = sign === 1 ? "1" : "";
  body.append(...[...body.rows].sort((a, b) => {
    const x = value(a), y = value(b);
    if (isNaN(x) && isNaN(y)) return sign * text(a).localeCompare(text(b));
    return isNaN(x) ? 1 : isNaN(y) ? -1 : sign * (x - y);
  }));
});

// Figures are drawn when they come near the window.
const observer = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    isIntersecting ? near.add(target) : near.delete(target);
    if (isIntersecting && stale.has(target)) draw(target);
  }
}, { rootMargin: "300px" });
DARK.addEventListener("change", () => { plots.forEach(div => stale.add(div)); drawAll(); });
// The address index.html#adam isolates the curves of adam.
function follow() {
  const name = decodeURIComponent(location.hash.slice(1));
  if (family.has(name)) state.isolated = [name];
  show();
}
addEventListener("hashchange", follow);
follow();
for (const div of plots) {
  // Its height from the beginning: what is below does not move when it is drawn.
  const { kind, problem } = div.dataset;
  if (kind === "ranks") div.style.minHeight = `${dotsHeight(DATA.ranks.length)}px`;
  if (kind === "target") {
    const reached = DATA.problems[problem].lines.filter(line => line.reached.length);
    div.style.minHeight = `${dotsHeight(reached.length)}px`;
  }
  observer.observe(div);
}
