
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("data").textContent);

  // Text from records only ever becomes text nodes and attribute values, never markup.
  const put = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const html = (name, attributes = {}, ...children) => put(document.createElement(name), attributes, children);
  const svg = (name, attributes = {}, ...children) => put(document.createElementNS(SVG, name), attributes, children);

  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const mean = (values) => sum(values) / values.length;
  const known = (values) => values.filter((value) => value !== null && value !== undefined);
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const range = (values) => [Math.min(...values), Math.max(...values)];
  const trim = (text) => text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  const short = (value) => value === 0 ? "0" : trim(Math.abs(value) < 1e-4 || Math.abs(value) >= 1e5
    ? value.toExponential() : value.toPrecision(6));
  const loss = (value) => value === 0 || Math.abs(value) >= 0.1 ? value.toFixed(3) : trim(value.toPrecision(3));
  const percent = (value) => (100 * value).toFixed(1) + "%";
  const byStepsize = (runs) => [...new Set(runs.map((run) => run.lr))].sort((a, b) => a - b)
    .map((lr) => [lr, runs.filter((run) => run.lr === lr)]);

  const MARKERS = {
    circle: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    square: "M-3.7 -3.7H3.7V3.7H-3.7Z",
    triangle: "M0 -5L4.33 2.5L-4.33 2.5Z",
    diamond: "M0 -5L5 0L0 5L-5 0Z",
    down: "M0 5L-4.33 -2.5L4.33 -2.5Z",
    plus: "M-1.6 -4.8H1.6V-1.6H4.8V1.6H1.6V4.8H-1.6V1.6H-4.8V-1.6H-1.6Z",
    hexagon: "M0 -5L4.33 -2.5L4.33 2.5L0 5L-4.33 2.5L-4.33 -2.5Z",
    star: "M0 -6.2L1.53 -2.1L5.9 -1.92L2.47 0.8L3.64 5.02L0 2.6L-3.64 5.02L-2.47 0.8L-5.9 -1.92L-1.53 -2.1Z",
  };
  const CROSS = "M-3.6 -3.6L3.6 3.6M-3.6 3.6L3.6 -3.6";
  const swatch = (series) => svg("svg", { class: `swatch c${series.slot}`, viewBox: "-7 -7 14 14", "aria-hidden": "true" },
    svg("path", { class: "mark", d: MARKERS[series.marker] }));

  // Axes with round ticks, three to eight of them.
  const linearTicks = (low, high, most) => {
    const raw = (high - low) / most || 1, unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * unit).find((s) => s >= raw * 0.999), ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) ticks.push(Number((k * step).toPrecision(12)));
    return ticks;
  };
  const logTicks = (low, high, most) => {
    for (const digits of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
      const ticks = [];
      for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++)
        ticks.push(...digits.map((digit) => Number(`${digit}e${k}`)).filter((tick) => tick >= low * 0.999 && tick <= high * 1.001));
      if (ticks.length <= most) return ticks.length > 2 ? ticks : linearTicks(low, high, most).filter((t) => t > 0);
    }
    const decades = linearTicks(Math.ceil(Math.log10(low)), Math.floor(Math.log10(high)), most);
    return decades.filter(Number.isInteger).map((k) => Number(`1e${k}`));
  };
  const axis = (low, high, from, to, log, most) => {
    const value = log ? Math.log10 : (v) => v, span = value(high) - value(low) || 1;
    return {
      low,
      at: (v) => from + ((value(v) - value(low)) / span) * (to - from),
      ticks: (log ? logTicks : linearTicks)(low, high, most),
    };
  };
  const domain = (points, log, ceiling) => {
    const usable = points.filter((point) => !log || point.low > 0);
    if (!usable.length) return [[1, 2], log ? [0.1, 1] : [0, 1]];
    const [start, end] = range(usable.map((point) => point.x));
    const low = Math.min(...usable.map((point) => point.low)), high = Math.max(...usable.map((point) => point.high));
    const xs = [start, end === start ? end + 1 : end];
    if (log) return [xs, [low / 1.12, 1.12 * (ceiling === null ? high : Math.max(Math.min(high, 1.1 * ceiling), low))]];
    const margin = 0.06 * (high - low) || 0.05;
    return [xs, [Math.max(0, low - margin), Math.min(ceiling, high + margin)]];
  };

  // The two plots: their lines, axes, and the text about a point.
  const point = (x, values, more) => ({ x, y: mean(values), low: Math.min(...values), high: Math.max(...values), ...more });
  const curves = (comparison, state) => {
    const key = state.measure, lines = [], log = key === "loss", write = log ? loss : percent;
    comparison.series.forEach((series, index) => {
      for (const [lr, runs] of byStepsize(series.runs)) {
        if (state.hidden.has(index) || (lr !== series.best && !state.every)) continue;
        const epochs = Array.from({ length: Math.max(...runs.map((run) => run[key].length)) }, (_, k) => known(runs.map((run) => run[key][k])));
        const points = epochs.flatMap((values, k) => values.length ? [point(k + 1, values)] : []);
        lines.push({ series: index, lr, points, minor: lr !== series.best });
      }
    });
    return {
      lines, crosses: [], log: [false, log], reference: log ? comparison.l0 : null,
      domain: domain(lines.flatMap((line) => line.points), log, log ? comparison.l0 : 1),
      labels: ["epoch", log ? "training loss" : "test accuracy"],
      tick: [short, log ? short : (v) => `${Math.round(1000 * v) / 10}%`],
      describe: (line, here) => ({
        title: `Epoch ${here.x}`,
        rows: lines.filter((other) => !other.minor || other === line).flatMap((other) => {
          const there = other.points.find((p) => p.x === here.x);
          return there ? [{ series: other.series, name: `${comparison.series[other.series].label}, ${short(other.lr)}`, value: write(there.y), y: there.y, current: other === line }] : [];
        }).sort((a, b) => (log ? a.y - b.y : b.y - a.y)),
      }),
    };
  };
  const stepsizes = (comparison, state) => {
    const lines = [], crosses = [];
    comparison.series.forEach((series, index) => {
      if (state.hidden.has(index)) return;
      const points = [];
      for (const [lr, runs] of byStepsize(series.runs)) {
        const finals = runs.filter((run) => !run.diverged).map((run) => run.final);
        if (finals.length) points.push(point(lr, finals, { runs, dots: finals.length > 1 ? finals : [] }));
        if (finals.length < runs.length) crosses.push({ series: index, x: lr, runs });
      }
      lines.push({ series: index, points, minor: false });
    });
    const describe = (line, { x, y, runs }) => {
      const rows = runs.map((run) => ({
        name: runs.length > 1 ? `seed ${run.seed}` : "training loss",
        value: run.diverged ? (run.final === null ? "diverged" : `diverged, ${loss(run.final)}`) : loss(run.final),
      }));
      if (y !== undefined && runs.length > 1) rows.unshift({ name: "training loss, mean", value: loss(y), current: true });
      for (const [name, key] of [["test accuracy", "accuracy"], ["dead units", "dead"]]) {
        const values = known(runs.filter((run) => !run.diverged).map((run) => known(run[key]).at(-1)));
        if (values.length) rows.push({ name, value: percent(mean(values)) });
      }
      return { title: `${comparison.series[line.series].label}, stepsize ${short(x)}`, rows };
    };
    const all = lines.flatMap((line) => line.points), rates = [...all, ...crosses].map(({ x }) => x);
    const [low, high] = rates.length ? range(rates) : [0.1, 1];
    return {
      lines, crosses, log: [true, true], domain: [[low / 1.25, high * 1.25], domain(all, true, null)[1]],
      labels: ["stepsize", "training loss, last epoch"], tick: [short, short], describe, strip: true, reference: null,
    };
  };

  // A plot is drawn anew whenever its width, its measure or its visible series change.
  let plots = 0;
  const chart = (figure, comparison, state, make) => {
    const box = figure.querySelector(".plot"), id = `chart-${++plots}`;
    const live = html("p", { class: "quiet", "aria-live": "polite" });
    const tip = html("div", { class: "tip", id: `${id}-tip`, role: "tooltip", hidden: "" });
    const root = svg("svg", {
      tabindex: "0", role: "group", "aria-label":
        `${figure.querySelector("h3").textContent}. Arrow keys move from value to value: left and right along a line, up and down between lines.`,
    });
    box.append(root, tip, live);
    let hits = [], cursor = -1, overlay = null, spec = null;

    const draw = () => {
      const width = Math.max(260, box.clientWidth), height = clamp(0.62 * width, 250, 380);
      spec = make(comparison, state);
      const [[x0, x1], [y0, y1]] = spec.domain;
      const left = 52, right = width - 14, top = spec.strip ? 30 : 14, bottom = height - 42;
      const y = axis(y0, y1, bottom, top, spec.log[1], Math.round(height / 48));
      const x = axis(x0, x1, left + 6, right - 6, spec.log[0], Math.round(width / 60));
      const line = (kind, a, b, c, d) => svg("line", { class: kind, x1: a, x2: b, y1: c, y2: d });
      const text = (content, at, down, anchor, more) => svg("text", { x: at, y: down, "text-anchor": anchor, ...more }, content);
      root.replaceChildren();
      root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      root.setAttribute("height", height);
      root.append(svg("defs", {}, svg("clipPath", { id: `${id}-clip` },
        svg("rect", { x: left, y: top - 6, width: right - left + 6, height: bottom - top + 12 }))));
      for (const tick of y.ticks)
        root.append(line("grid", left, right, y.at(tick), y.at(tick)), text(spec.tick[1](tick), left - 7, y.at(tick) + 4, "end"));
      for (const tick of x.ticks.filter((t) => spec.log[0] || Number.isInteger(t)))
        root.append(line("axis", x.at(tick), x.at(tick), bottom, bottom + 4), text(spec.tick[0](tick), x.at(tick), bottom + 18, "middle"));
      const [xLabel, yLabel] = spec.labels.map((label, k) => label + (spec.log[k] ? " (log scale)" : ""));
      root.append(line("axis", left, right, bottom, bottom), text(xLabel, (left + right) / 2, height - 6, "middle"),
        text(yLabel, -(top + bottom) / 2, 11, "middle", { transform: "rotate(-90)" }));
      if (spec.reference !== null && spec.reference < y1 && spec.reference > y0)
        root.append(line("reference", left, right, y.at(spec.reference), y.at(spec.reference)),
          text("before training", right, y.at(spec.reference) - 4, "end"));
      const marks = svg("g", { "clip-path": `url(#${id}-clip)` });
      root.append(marks);
      hits = [];
      for (const one of [...spec.lines].sort((a, b) => b.minor - a.minor)) marks.append(...drawLine(one, x, y, top, bottom));
      if (spec.crosses.length) root.append(text("div.", left - 7, 17, "end"));
      const present = [...new Set(spec.crosses.map((cross) => cross.series))];
      for (const cross of spec.crosses) {
        const px = x.at(cross.x) + 7 * (present.indexOf(cross.series) - (present.length - 1) / 2);
        root.append(svg("path", { class: `cross c${comparison.series[cross.series].slot}`, d: CROSS, transform: `translate(${px} 13)` }));
        hits.push({ px, py: 13, line: cross, point: cross });
      }
      overlay = svg("g");
      root.append(overlay);
      hide();
    };

    const drawLine = (line, x, y, top, bottom) => {
      if (!line.points.length) return [];
      const series = comparison.series[line.series], height = (v) => clamp(y.at(Math.max(v, y.low / 10)), top - 2000, bottom + 2000);
      const at = line.points.map((p) => [x.at(p.x), height(p.y)]), every = spec.strip ? 1 : Math.ceil(at.length / 8);
      const path = (pairs) => `M${pairs.map((pair) => `${pair[0].toFixed(1)} ${pair[1].toFixed(1)}`).join("L")}`;
      const edge = (key) => line.points.map((p) => [x.at(p.x), height(p[key])]);
      const group = svg("g", { class: `c${series.slot}`, "data-series": line.series });
      if (!line.minor && line.points.some((p) => p.high > p.low))
        group.append(svg("path", { class: "band", d: path([...edge("high"), ...edge("low").reverse()]) + "Z" }));
      group.append(svg("path", { class: line.minor ? "line minor" : "line", d: path(at) }));
      line.points.forEach((p, k) => {
        const [px, py] = at[k];
        for (const dot of p.dots || []) group.append(svg("circle", { class: "dot", cx: px, cy: height(dot), r: 2.5 }));
        if (!line.minor && (k % every === 0 || k === at.length - 1)) group.append(svg("path", { class: "mark", d: MARKERS[series.marker], transform: `translate(${px.toFixed(1)} ${py.toFixed(1)})` }));
        if (py > top - 8 && py < bottom + 8) hits.push({ px, py, line, point: p });
      });
      return [group];
    };

    const show = (index, spoken) => {
      cursor = index;
      const hit = hits[index], text = spec.describe(hit.line, hit.point);
      overlay.replaceChildren(svg("circle", { class: "ring", cx: hit.px, cy: hit.py, r: 8 }));
      tip.replaceChildren(html("strong", {}, text.title));
      for (const row of text.rows) {
        const name = html("span", { class: "name" }, html("span", {}, row.name));
        if (row.series !== undefined) name.prepend(swatch(comparison.series[row.series]));
        tip.append(html("div", row.current ? { class: "current" } : {}, name, html("span", {}, row.value)));
      }
      tip.hidden = false;
      const free = box.clientWidth - tip.offsetWidth, scale = box.clientWidth / root.viewBox.baseVal.width;
      const px = hit.px * scale, py = hit.py * scale;
      const left = px + 16 <= free ? px + 16 : px - 16 - tip.offsetWidth;
      tip.style.left = `${clamp(left, 0, Math.max(0, free))}px`;
      tip.style.top = `${left < 0 ? py + 18 : clamp(py - tip.offsetHeight / 2, 0, Math.max(0, box.clientHeight - tip.offsetHeight))}px`;
      if (spoken) live.textContent = [text.title, ...text.rows.map((row) => `${row.name}: ${row.value}`)].join("; ");
    };
    const hide = () => {
      cursor = -1;
      tip.hidden = true;
      overlay?.replaceChildren();
    };
    const closest = (items, distance) => items.reduce((best, item, k) => distance(item) < distance(items[best]) ? k : best, 0);
    const follow = (event) => {
      const bounds = root.getBoundingClientRect(), scale = root.viewBox.baseVal.width / bounds.width;
      const px = (event.clientX - bounds.left) * scale, py = (event.clientY - bounds.top) * scale;
      const distance = (hit) => (hit.px - px) ** 2 + (hit.py - py) ** 2, index = closest(hits, distance);
      if (!hits.length || distance(hits[index]) >= 80 ** 2) hide(); else if (index !== cursor) show(index, false);
    };
    const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0] };
    const move = (event) => {
      if (event.key === "Escape") return hide();
      if (!(event.key in KEYS) || !hits.length) return undefined;
      event.preventDefault();
      if (cursor < 0) return show(0, true);
      const [along, across] = KEYS[event.key], here = hits[cursor];
      const lines = [...new Set(hits.map((hit) => hit.line.series))];
      const series = lines[(lines.indexOf(here.line.series) + across + lines.length) % lines.length];
      const mine = hits.filter((hit) => hit.line.series === series).sort((a, b) => a.px - b.px);
      const position = across ? closest(mine, (hit) => Math.abs(hit.px - here.px)) : clamp(mine.indexOf(here) + along, 0, mine.length - 1);
      return show(hits.indexOf(mine[position]), true);
    };
    root.addEventListener("pointermove", follow);
    root.addEventListener("pointerdown", follow);
    root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    root.addEventListener("blur", hide);
    root.addEventListener("keydown", move);
    new ResizeObserver(draw).observe(box);
    return draw;
  };

  // Tables are sorted by any column, missing values last; times follow the target.
  const sortable = (table) => {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, column) => {
      const button = html("button", { type: "button" }, head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
        const value = ({ cells: { [column]: cell } }) =>
          column === 0 ? cell.textContent.trim() : "value" in cell.dataset ? Number(cell.dataset.value) : null;
        const order = (left, right) => left === null || right === null ? (left === null) - (right === null)
          : direction * (column === 0 ? left.localeCompare(right) : left - right);
        body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
      });
    });
  };
  const median = (values) => {
    const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  };
  const reach = (run, target, column) => {
    const row = run.loss.findIndex((value) => value !== null && value <= target);
    if (row < 0) return Infinity;
    return column === "epochs" ? row + 1 : sum(known(run[column].slice(0, row + 1)));
  };
  const timed = (block, comparison) => {
    const input = block.querySelector("input");
    if (!input) return;
    const columns = [...block.querySelectorAll("thead th")].map((head) => head.textContent);
    input.addEventListener("input", () => {
      const target = Number(input.value);
      if (!(target > 0)) return;
      for (const row of block.querySelectorAll("tbody tr")) {
        const series = comparison.series[Number(row.dataset.series)], runs = series.runs.filter((run) => run.lr === series.best);
        columns.forEach((column, k) => {
          if (k === 0 || runs.some((run) => run[column === "epochs" ? "loss" : column].every((value) => value === null))) return;
          const value = median(runs.map((run) => reach(run, target, column))), cell = row.cells[k];
          delete cell.dataset.value;
          if (Number.isFinite(value)) cell.dataset.value = value;
          const digits = column === "seconds" ? 1 : 0;
          cell.textContent = Number.isFinite(value) ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "∞";
        });
      }
    });
  };

  // What a reader can choose: the visible series, the measure, every stepsize.
  const legend = (section, comparison, state, redraw) => {
    comparison.series.forEach((series, index) => {
      const button = html("button", { type: "button", "aria-pressed": "true", class: `c${series.slot}` }, swatch(series), series.label);
      button.addEventListener("click", () => {
        const shown = state.hidden.delete(index);
        if (!shown) state.hidden.add(index);
        button.setAttribute("aria-pressed", shown);
        for (const row of section.querySelectorAll(`tr[data-series="${index}"]`)) row.classList.toggle("off", !shown);
        redraw();
      });
      section.querySelector(".legend").append(button);
    });
  };
  const controls = (section, comparison, number, state, redraw) => {
    const place = section.querySelector(".controls"), choice = html("span", { class: "switch", role: "radiogroup", "aria-label": "Measure" });
    for (const [key, label] of [["loss", "Training loss"], ["accuracy", "Test accuracy"]]) {
      const input = html("input", { type: "radio", name: `measure-${number}`, value: key });
      input.checked = key === state.measure;
      input.addEventListener("change", () => { state.measure = key; redraw(); });
      choice.append(html("label", {}, input, label));
    }
    place.append(choice);
    if (comparison.series.some((series) => byStepsize(series.runs).length > 1)) {
      const every = html("input", { type: "checkbox" });
      every.addEventListener("change", () => { state.every = every.checked; redraw(); });
      place.append(html("label", {}, every, " every stepsize"));
    }
  };

  data.forEach((comparison, k) => {
    const section = document.getElementById(`comparison-${k + 1}`), state = { hidden: new Set(), measure: "loss", every: false };
    const draws = [];
    const redraw = () => draws.forEach((draw) => draw());
    legend(section, comparison, state, redraw);
    controls(section, comparison, k, state, redraw);
    for (const [name, make] of Object.entries({ curves, stepsizes }))
      draws.push(chart(section.querySelector(`[data-chart=${name}]`), comparison, state, make));
    for (const row of section.querySelectorAll("tr[data-series]")) row.cells[0].prepend(swatch(comparison.series[Number(row.dataset.series)]));
    timed(section.querySelector("[data-table=target]"), comparison);
    section.querySelectorAll("table").forEach(sortable);
  });

  // The theme follows the system until the reader chooses one.
  const theme = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)"), page = document.documentElement;
  const stored = (value) => {
    try {
      if (value) localStorage.setItem("evenstep-theme", value);
      return localStorage.getItem("evenstep-theme");
    } catch { return value; }
  };
  const dark = () => (page.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => { theme.textContent = dark() ? "Light theme" : "Dark theme"; };
  const before = stored();
  if (before === "light" || before === "dark") page.dataset.theme = before;
  theme.addEventListener("click", () => {
    page.dataset.theme = dark() ? "light" : "dark";
    stored(page.dataset.theme);
    name();
  });
  system.addEventListener("change", name);
  theme.hidden = false;
  name();
})();
