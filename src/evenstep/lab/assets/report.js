
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("data").textContent);

  // Texts from records only ever become text nodes and attribute values, never markup.
  const put = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const html = (name, attributes = {}, ...children) => put(document.createElement(name), attributes, children);
  const svg = (name, attributes = {}, ...children) => put(document.createElementNS(SVG, name), attributes, children);

  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const known = (values) => values.filter((value) => value !== null && value !== undefined);
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const trim = (text) => text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  const short = (value) => value === 0 ? "0" : trim(Math.abs(value) < 1e-4 || Math.abs(value) >= 1e5
    ? value.toExponential() : value.toPrecision(6));
  const loss = (value) => value === 0 || Math.abs(value) >= 0.1 ? value.toFixed(3) : trim(value.toPrecision(3));
  const percent = (value) => (100 * value).toFixed(1) + "%";
  const grouped = (runs) => {
    const found = new Map();
    for (const run of runs) found.set(run.lr, [...(found.get(run.lr) || []), run]);
    return [...found].sort((a, b) => a[0] - b[0]);
  };

  // Markers, about the origin.
  const polygon = (corners, turn, inner, outer = 5) => {
    const points = [];
    const count = inner ? 2 * corners : corners;
    for (let k = 0; k < count; k++) {
      const angle = turn + (2 * Math.PI * k) / count;
      const radius = inner && k % 2 ? inner : outer;
      points.push(`${(radius * Math.sin(angle)).toFixed(2)} ${(-radius * Math.cos(angle)).toFixed(2)}`);
    }
    return `M${points.join("L")}Z`;
  };
  const MARKERS = {
    circle: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    square: "M-3.7 -3.7H3.7V3.7H-3.7Z",
    triangle: polygon(3, 0),
    diamond: polygon(4, 0),
    down: polygon(3, Math.PI),
    plus: "M-1.6 -4.8H1.6V-1.6H4.8V1.6H1.6V4.8H-1.6V1.6H-4.8V-1.6H-1.6Z",
    hexagon: polygon(6, 0),
    star: polygon(5, 0, 2.6, 6.2),
  };
  const CROSS = "M-3.6 -3.6L3.6 3.6M-3.6 3.6L3.6 -3.6";
  const swatch = (series) => svg("svg", { class: `swatch c${series.slot}`, viewBox: "-7 -7 14 14", "aria-hidden": "true" },
    svg("path", { class: "mark", d: MARKERS[series.marker] }));

  // Ticks: round numbers, three to eight of them.
  const linearTicks = (low, high, most) => {
    const raw = (high - low) / most || 1;
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * unit).find((s) => s >= raw * 0.999);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) ticks.push(Number((k * step).toPrecision(12)));
    return ticks;
  };
  const logTicks = (low, high, most) => {
    for (const digits of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
      const ticks = [];
      for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++)
        for (const digit of digits) {
          const tick = Number(`${digit}e${k}`);
          if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
        }
      if (ticks.length <= most) return ticks.length > 2 ? ticks : linearTicks(low, high, most).filter((t) => t > 0);
    }
    const decades = linearTicks(Math.ceil(Math.log10(low)), Math.floor(Math.log10(high)), most);
    return decades.filter(Number.isInteger).map((k) => Number(`1e${k}`));
  };
  const axis = (low, high, from, to, log, most) => {
    const value = log ? Math.log10 : (v) => v;
    const span = value(high) - value(low) || 1;
    return {
      low, high,
      at: (v) => from + ((value(v) - value(low)) / span) * (to - from),
      ticks: (log ? logTicks : linearTicks)(low, high, most),
    };
  };

  // What the two figures show.
  const curves = (comparison, state) => {
    const key = state.measure, lines = [];
    comparison.series.forEach((series, index) => {
      if (state.hidden.has(index)) return;
      for (const [lr, runs] of grouped(series.runs)) {
        const best = lr === series.best;
        if (!best && !state.every) continue;
        const points = [];
        for (let k = 0; k < Math.max(...runs.map((run) => run[key].length)); k++) {
          const values = known(runs.map((run) => run[key][k]));
          if (values.length) points.push({ x: k + 1, y: mean(values), low: Math.min(...values), high: Math.max(...values), seeds: values.length });
        }
        lines.push({ series: index, lr, points, minor: !best });
      }
    });
    const all = lines.flatMap((line) => line.points);
    const log = key === "loss";
    const write = log ? loss : percent;
    return {
      lines, crosses: [], log: [false, log], domain: domain(all, log, log ? comparison.l0 : 1), write,
      labels: ["epoch", log ? "training loss" : "test accuracy"],
      reference: log ? comparison.l0 : null,
      tick: [short, log ? short : (v) => `${Math.round(1000 * v) / 10}%`],
      describe: (line, point) => ({
        title: `Epoch ${point.x}`,
        rows: lines.filter((other) => !other.minor || other === line).flatMap((other) => {
          const there = other.points.find((p) => p.x === point.x);
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
      for (const [lr, runs] of grouped(series.runs)) {
        const good = runs.filter((run) => !run.diverged);
        const finals = good.map((run) => run.final);
        const lost = runs.length - good.length;
        if (good.length) points.push({ x: lr, y: mean(finals), low: Math.min(...finals), high: Math.max(...finals), runs, dots: finals.length > 1 ? finals : [] });
        if (lost) crosses.push({ series: index, x: lr, runs });
      }
      lines.push({ series: index, points, minor: false });
    });
    const last = (values) => known(values).at(-1);
    const describe = (line, point) => {
      const rows = point.runs.map((run) => ({
        name: point.runs.length > 1 ? `seed ${run.seed}` : "training loss",
        value: run.diverged ? (run.final === null ? "diverged" : `diverged, ${loss(run.final)}`) : loss(run.final),
      }));
      if (point.y !== undefined && point.runs.length > 1) rows.unshift({ name: "training loss, mean", value: loss(point.y), current: true });
      const good = point.runs.filter((run) => !run.diverged);
      for (const [name, key] of [["test accuracy", "accuracy"], ["dead units", "dead"]]) {
        const values = known(good.map((run) => last(run[key])));
        if (values.length) rows.push({ name, value: percent(mean(values)) });
      }
      return { title: `${comparison.series[line.series].label}, stepsize ${short(point.x)}`, rows, series: line.series };
    };
    const all = lines.flatMap((line) => line.points);
    const rates = [...all, ...crosses].map((point) => point.x);
    const edges = rates.length ? [Math.min(...rates), Math.max(...rates)] : [0.1, 1];
    return {
      lines, crosses, log: [true, true], domain: [[edges[0] / 1.25, edges[1] * 1.25], domain(all, true, null)[1]],
      labels: ["stepsize", "training loss, last epoch"], tick: [short, short], describe, strip: true, reference: null,
    };
  };

  const domain = (points, log, ceiling) => {
    const usable = points.filter((point) => !log || point.low > 0);
    if (!usable.length) return [[1, 2], log ? [0.1, 1] : [0, 1]];
    const xs = usable.map((point) => point.x);
    const low = Math.min(...usable.map((point) => point.low)), high = Math.max(...usable.map((point) => point.high));
    const end = Math.max(...xs) === Math.min(...xs) ? Math.max(...xs) + 1 : Math.max(...xs);
    if (!log) {
      const room = 0.06 * (high - low) || 0.05;
      return [[Math.min(...xs), end], [Math.max(0, low - room), Math.min(ceiling, high + room)]];
    }
    const top = ceiling === null ? high : Math.max(Math.min(high, 1.1 * ceiling), low);
    return [[Math.min(...xs), end], [low / 1.12, top * 1.12]];
  };

  // A figure: drawn anew whenever its width or what it shows changes.
  let numbered = 0;
  const chart = (figure, comparison, state, make) => {
    const box = figure.querySelector(".plot");
    const id = `chart-${++numbered}`;
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
      const inner = { left: 52, right: width - 14, top: spec.strip ? 30 : 14, bottom: height - 42 };
      const y = axis(y0, y1, inner.bottom, inner.top, spec.log[1], Math.round(height / 48));
      const x = axis(x0, x1, inner.left + 6, inner.right - 6, spec.log[0], Math.round(width / 60));
      root.replaceChildren();
      root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      root.setAttribute("height", height);
      root.append(svg("defs", {}, svg("clipPath", { id: `${id}-clip` },
        svg("rect", { x: inner.left, y: inner.top - 6, width: inner.right - inner.left + 6, height: inner.bottom - inner.top + 12 }))));
      for (const tick of y.ticks) root.append(
        svg("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y.at(tick), y2: y.at(tick) }),
        svg("text", { x: inner.left - 7, y: y.at(tick) + 4, "text-anchor": "end" }, spec.tick[1](tick)));
      for (const tick of x.ticks.filter((t) => spec.log[0] || Number.isInteger(t))) root.append(
        svg("line", { class: "axis", x1: x.at(tick), x2: x.at(tick), y1: inner.bottom, y2: inner.bottom + 4 }),
        svg("text", { x: x.at(tick), y: inner.bottom + 18, "text-anchor": "middle" }, spec.tick[0](tick)));
      root.append(
        svg("line", { class: "axis", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }),
        svg("text", { x: (inner.left + inner.right) / 2, y: height - 6, "text-anchor": "middle" }, spec.labels[0] + (spec.log[0] ? " (log scale)" : "")),
        svg("text", { x: -(inner.top + inner.bottom) / 2, y: 11, transform: "rotate(-90)", "text-anchor": "middle" }, spec.labels[1] + (spec.log[1] ? " (log scale)" : "")));
      if (spec.reference !== null && spec.reference < y1 && spec.reference > y0) root.append(
        svg("line", { class: "reference", x1: inner.left, x2: inner.right, y1: y.at(spec.reference), y2: y.at(spec.reference) }),
        svg("text", { x: inner.right, y: y.at(spec.reference) - 4, "text-anchor": "end" }, "before training"));
      const marks = svg("g", { "clip-path": `url(#${id}-clip)` });
      root.append(marks);
      hits = [];
      for (const line of [...spec.lines].sort((a, b) => b.minor - a.minor)) drawLine(marks, line, x, y, inner);
      if (spec.strip && spec.crosses.length) {
        root.append(svg("text", { x: inner.left - 7, y: 17, "text-anchor": "end" }, "div."));
        const present = [...new Set(spec.crosses.map((cross) => cross.series))];
        for (const cross of spec.crosses) {
          const px = x.at(cross.x) + 7 * (present.indexOf(cross.series) - (present.length - 1) / 2);
          root.append(svg("path", { class: `cross c${comparison.series[cross.series].slot}`, d: CROSS, transform: `translate(${px} 13)` }));
          hits.push({ px, py: 13, line: cross, point: cross });
        }
      }
      overlay = svg("g");
      root.append(overlay);
      hide();
    };

    const drawLine = (parent, line, x, y, inner) => {
      const series = comparison.series[line.series], floor = (v) => clamp(y.at(Math.max(v, y.low / 10)), inner.top - 2000, inner.bottom + 2000);
      const at = line.points.map((point) => [x.at(point.x), floor(point.y)]);
      if (!at.length) return;
      const every = spec.strip ? 1 : Math.ceil(at.length / 8);
      const path = (pairs) => `M${pairs.map((pair) => `${pair[0].toFixed(1)} ${pair[1].toFixed(1)}`).join("L")}`;
      const group = svg("g", { class: `c${series.slot}`, "data-series": line.series });
      if (!line.minor && line.points.some((point) => point.high > point.low))
        group.append(svg("path", { class: "band", d: path([
          ...line.points.map((point) => [x.at(point.x), floor(point.high)]),
          ...line.points.map((point) => [x.at(point.x), floor(point.low)]).reverse()]) + "Z" }));
      group.append(svg("path", { class: line.minor ? "line minor" : "line", d: path(at) }));
      line.points.forEach((point, k) => {
        for (const dot of point.dots || []) group.append(svg("circle", { class: "dot", cx: at[k][0], cy: floor(dot), r: 2.5 }));
        if (!line.minor && (k % every === 0 || k === at.length - 1)) group.append(svg("path", { class: "mark", d: MARKERS[series.marker], transform: `translate(${at[k][0].toFixed(1)} ${at[k][1].toFixed(1)})` }));
        if (at[k][1] > inner.top - 8 && at[k][1] < inner.bottom + 8) hits.push({ px: at[k][0], py: at[k][1], line, point });
      });
      parent.append(group);
    };

    const show = (index, spoken) => {
      cursor = index;
      const hit = hits[index], told = spec.describe(hit.line, hit.point);
      overlay.replaceChildren(svg("circle", { class: "ring", cx: hit.px, cy: hit.py, r: 8 }));
      tip.replaceChildren(html("strong", {}, told.title));
      for (const row of told.rows) {
        const name = html("span", { class: "name" }, html("span", {}, row.name));
        if (row.series !== undefined) name.prepend(swatch(comparison.series[row.series]));
        tip.append(html("div", row.current ? { class: "current" } : {}, name, html("span", {}, row.value)));
      }
      tip.hidden = false;
      const room = box.clientWidth - tip.offsetWidth, scale = box.clientWidth / root.viewBox.baseVal.width;
      const px = hit.px * scale, py = hit.py * scale;
      const right = px + 16 <= room, left = right ? px + 16 : px - 16 - tip.offsetWidth;
      tip.style.left = `${clamp(left, 0, Math.max(0, room))}px`;
      tip.style.top = `${left < 0 ? py + 18 : clamp(py - tip.offsetHeight / 2, 0, Math.max(0, box.clientHeight - tip.offsetHeight))}px`;
      if (spoken) live.textContent = [told.title, ...told.rows.map((row) => `${row.name}: ${row.value}`)].join("; ");
    };
    const hide = () => {
      cursor = -1;
      tip.hidden = true;
      if (overlay) overlay.replaceChildren();
    };
    const nearest = (event) => {
      const bounds = root.getBoundingClientRect(), scale = root.viewBox.baseVal.width / bounds.width;
      const px = (event.clientX - bounds.left) * scale, py = (event.clientY - bounds.top) * scale;
      let best = -1, least = 80 ** 2;
      hits.forEach((hit, index) => {
        const distance = (hit.px - px) ** 2 + (hit.py - py) ** 2;
        if (distance < least) [best, least] = [index, distance];
      });
      return best;
    };
    const point = (event) => {
      const index = nearest(event);
      if (index < 0) hide(); else if (index !== cursor) show(index, false);
    };
    root.addEventListener("pointermove", point);
    root.addEventListener("pointerdown", point);
    root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    root.addEventListener("blur", hide);
    root.addEventListener("keydown", (event) => {
      const keys = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0] };
      if (event.key === "Escape") return hide();
      if (!(event.key in keys) || !hits.length) return undefined;
      event.preventDefault();
      if (cursor < 0) return show(0, true);
      const [along, across] = keys[event.key], here = hits[cursor];
      const lines = [...new Set(hits.map((hit) => hit.line.series))];
      const series = lines[(lines.indexOf(here.line.series) + across + lines.length) % lines.length];
      const mine = hits.map((hit, index) => [hit, index]).filter(([hit]) => hit.line.series === series).sort((a, b) => a[0].px - b[0].px);
      const position = across
        ? mine.reduce((best, [hit], k) => Math.abs(hit.px - here.px) < Math.abs(mine[best][0].px - here.px) ? k : best, 0)
        : clamp(mine.findIndex(([, index]) => index === cursor) + along, 0, mine.length - 1);
      return show(mine[position][1], true);
    });
    new ResizeObserver(draw).observe(box);
    return draw;
  };

  // Tables: sorted by any column, missing values last; times follow the target.
  const sortable = (table) => {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, column) => {
      const button = html("button", { type: "button" }, head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
        const value = (row) => {
          const cell = row.cells[column];
          return column === 0 ? cell.textContent.trim() : "value" in cell.dataset ? Number(cell.dataset.value) : null;
        };
        const order = (a, b) => {
          const [left, right] = [value(a), value(b)];
          if (left === null || right === null) return (left === null) - (right === null);
          return direction * (column === 0 ? left.localeCompare(right) : left - right);
        };
        body.append(...[...body.rows].sort(order));
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
    return column === "epochs" ? row + 1 : known(run[column].slice(0, row + 1)).reduce((sum, value) => sum + value, 0);
  };
  const timed = (block, comparison) => {
    const input = block.querySelector("input");
    if (!input) return;
    const columns = [...block.querySelectorAll("thead th")].map((head) => head.textContent);
    input.addEventListener("input", () => {
      const target = Number(input.value);
      if (!(target > 0)) return;
      for (const row of block.querySelectorAll("tbody tr")) {
        const series = comparison.series[Number(row.dataset.series)];
        const runs = series.runs.filter((run) => run.lr === series.best);
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
    if (comparison.series.some((series) => grouped(series.runs).length > 1)) {
      const every = html("input", { type: "checkbox" });
      every.addEventListener("change", () => { state.every = every.checked; redraw(); });
      place.append(html("label", {}, every, " every stepsize"));
    }
  };

  data.forEach((comparison, k) => {
    const section = document.getElementById(`comparison-${k + 1}`);
    const state = { hidden: new Set(), measure: "loss", every: false };
    const draws = [];
    const redraw = () => draws.forEach((draw) => draw());
    legend(section, comparison, state, redraw);
    controls(section, comparison, k, state, redraw);
    draws.push(chart(section.querySelector("[data-chart=curves]"), comparison, state, curves));
    draws.push(chart(section.querySelector("[data-chart=stepsizes]"), comparison, state, stepsizes));
    for (const row of section.querySelectorAll("tr[data-series]")) row.cells[0].prepend(swatch(comparison.series[Number(row.dataset.series)]));
    timed(section.querySelector("[data-table=target]"), comparison);
    section.querySelectorAll("table").forEach(sortable);
  });

  // Light or dark: as the system has it, until the reader chooses.
  const theme = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const stored = (value) => {
    try {
      if (value) localStorage.setItem("evenstep-theme", value);
      return localStorage.getItem("evenstep-theme");
    } catch { return value; }
  };
  const dark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => { theme.textContent = dark() ? "Light theme" : "Dark theme"; };
  const before = stored();
  if (before === "light" || before === "dark") document.documentElement.dataset.theme = before;
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    stored(document.documentElement.dataset.theme);
    name();
  });
  system.addEventListener("change", name);
  theme.hidden = false;
  name();
})();
