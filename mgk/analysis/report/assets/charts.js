"use strict";
// Small SVG charts. Colours are variables of the style sheet, so switching between light and dark needs no redrawing.
const SVG = "http://www.w3.org/2000/svg";
// One unit is one pixel on a phone, so that text is not scaled there.
const WIDTH = Math.max(280, Math.min(420, window.innerWidth - 62));

function make(tag, attributes = {}, ...children) {
  const shape = ["svg", "g", "rect", "path", "line", "text", "circle", "title"].includes(tag);
  const node = shape ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") node.addEventListener("click", value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const canvas = (height, label) => make("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });
const colour = (n) => `var(--c${n % 8})`;
const text = (x, y, content, anchor = "middle", kind = "") =>
  make("text", { x, y, "text-anchor": anchor, class: kind }, String(content));
const titled = (node, title) => { node.append(make("title", {}, title)); return node; };

const UNITS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
function short(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  for (const [unit, letter] of UNITS)
    if (size >= unit) return `${+(value / unit).toPrecision(digits)}${letter}`;
  return String(+value.toPrecision(digits));
}

// Labels of the ticks of an axis, with as many decimals as keep them exact, and so different from each other.
function tickLabels(values, suffix = "") {
  const share = suffix === " %" ? 100 : 1, most = Math.max(...values.map(Math.abs));
  const step = values.length > 1 ? Math.min(...values.slice(1).map((v, n) => Math.abs(v - values[n]))) : most;
  // A unit that would need many decimals is not used: 100.2, not 0.1002k.
  const [unit, letter] = share === 1 ? UNITS.find(([size]) => most >= size && step >= size / 100) ?? [1, ""] : [1, ""];
  const shown = values.map((v) => (v * share) / unit);
  const exact = (decimals) => shown.every((v) => Math.abs(+v.toFixed(decimals) - v) <= (1e-6 * step * share) / unit);
  const decimals = Array.from({ length: 12 }, (_, n) => n).find(exact) ?? 12;
  return shown.map((v) => (v === 0 ? `0${suffix}` : `${v.toFixed(decimals)}${letter}${suffix}`));
}
const DASHES = ["", "7 4", "2 3", "10 3 2 3"];
const dash = (n) => DASHES[n % DASHES.length];
// Approximate width of a label, in pixels.
const textWidth = (labels) => 6.4 * Math.max(0, ...labels.map((label) => label.length));

function ticks(low, high, count = 4) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const values = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-6; t += step) values.push(+t.toPrecision(12));
  return values;
}

// Entries [name, fill] of areas, or [name, fill, dash] of lines.
function legend(names) {
  return make("div", { class: "legend" }, ...names.map(([name, fill, dashes]) => {
    if (dashes !== undefined) {
      const stroke = make("line", { x1: 0, x2: 28, y1: 5, y2: 5, style: `stroke:${fill}`, "stroke-width": 3, "stroke-dasharray": dashes || null });
      return make("span", {}, make("svg", { viewBox: "0 0 28 10", "aria-hidden": "true" }, stroke), name);
    }
    const key = make("i");
    key.style.background = fill;
    return make("span", {}, key, name);
  }));
}

// Bars: items of { label, parts: [{ value, fill, title }] }, side by side within an item.
function bars(items, { high, suffix = "", reference = null, selected = -1, tap = null, label = "" } = {}) {
  const height = 190, bottom = 26, top = 10;
  const most = high ?? Math.max(1e-12, ...items.flatMap((item) => item.parts.map((part) => part.value)));
  const marks = ticks(0, most), names = tickLabels(marks, suffix), left = Math.max(40, 10 + textWidth(names));
  const picture = canvas(height, label);
  const y = (value) => top + (height - top - bottom) * (1 - value / most);
  marks.forEach((t, n) => {
    picture.append(make("line", { class: "grid", x1: left, x2: WIDTH, y1: y(t), y2: y(t) }), text(left - 6, y(t) + 4, names[n], "end"));
  });
  const slot = (WIDTH - left) / items.length;
  const every = Math.ceil(items.length / 16);
  items.forEach((item, n) => {
    const group = make("g", tap ? { class: "tap", onclick: () => tap(n) } : {});
    const width = Math.min(slot * 0.8, 54 * item.parts.length), barWidth = width / item.parts.length;
    const start = left + n * slot + (slot - width) / 2;
    group.append(make("rect", { x: left + n * slot, y: top, width: slot, height: height - top, fill: "transparent" }));
    item.parts.forEach((part, m) => {
      const bar = make("rect", {
        x: start + m * barWidth + 1, width: Math.max(1, barWidth - 2), y: y(part.value), height: Math.max(0, y(0) - y(part.value)),
        rx: 2, style: `fill:${part.fill}`, opacity: selected < 0 || selected === n ? 1 : 0.45,
      });
      group.append(titled(bar, part.title));
    });
    if (n % every === 0) group.append(text(left + (n + 0.5) * slot, height - 9, item.label, "middle", n === selected ? "strong" : ""));
    picture.append(group);
  });
  if (reference !== null) {
    picture.append(make("line", { x1: left, x2: WIDTH, y1: y(reference), y2: y(reference), style: "stroke:var(--ink)", "stroke-dasharray": "4 3" }));
  }
  return picture;
}

// Histogram of `all` values, and of the subset `some`, in bins from 0 to `high`, in per cent.
function histogram(all, some, high, { bins = 24, unit = "", label = "" } = {}) {
  const count = (values) => {
    const counts = new Array(bins).fill(0);
    for (const value of values) counts[Math.min(bins - 1, Math.floor((value / high) * bins))] += 1;
    return counts.map((n) => (values.length ? (100 * n) / values.length : 0));
  };
  const height = 190, left = 40, bottom = 38, top = 10, right = 16;
  const [whole, part] = [count(all), count(some)];
  const most = Math.max(1, ...whole, ...part);
  const picture = canvas(height, label);
  const y = (value) => top + (height - top - bottom) * (1 - value / most);
  const slot = (WIDTH - left - right) / bins;
  const marks = ticks(0, most), names = tickLabels(marks);
  marks.forEach((t, n) => {
    picture.append(make("line", { class: "grid", x1: left, x2: WIDTH, y1: y(t), y2: y(t) }), text(left - 6, y(t) + 4, `${names[n]} %`, "end"));
  });
  for (let n = 0; n < bins; n += 1) {
    const range = `${short((n * high) / bins)} to ${short(((n + 1) * high) / bins)}${unit}`;
    const x = left + n * slot;
    picture.append(
      titled(make("rect", { x: x + 0.5, width: slot - 1, y: y(whole[n]), height: y(0) - y(whole[n]), style: "fill:var(--quiet)", opacity: 0.35 }), `all heads, ${range}: ${whole[n].toFixed(1)} %`),
      titled(make("rect", { x: x + slot * 0.25, width: slot * 0.5, y: y(part[n]), height: y(0) - y(part[n]), style: "fill:var(--c0)" }), `this head, ${range}: ${part[n].toFixed(1)} %`),
    );
  }
  const across = ticks(0, high, 5), acrossNames = tickLabels(across);
  across.forEach((t, n) => picture.append(text(left + ((WIDTH - left - right) * t) / high, height - 22, acrossNames[n] + unit)));
  return picture;
}

// A matrix of similarities from 0 to 1, with the heads in `order`.
function heat(matrix, order, selected, tap, label) {
  const count = order.length, left = 30, top = 20, side = Math.min(64, (WIDTH - left - 60) / count);
  const picture = canvas(top + side * count + 8, label);
  order.forEach((a, i) => {
    const strong = a === selected ? "strong" : "";
    if (count <= 24 || i % 2 === 0) {
      picture.append(text(left - 6, top + (i + 0.5) * side + 4, a + 1, "end", strong), text(left + (i + 0.5) * side, top - 6, a + 1, "middle", strong));
    }
    order.forEach((b, j) => {
      const value = Math.max(0, Math.min(1, matrix[a][b]));
      const fill = `color-mix(in oklab, var(--heat-high) ${(100 * value).toFixed(1)}%, var(--heat-low))`;
      const cell = make("rect", {
        x: left + j * side + 0.5, y: top + i * side + 0.5, width: side - 1, height: side - 1, rx: Math.min(3, side / 6),
        style: `fill:${fill}`, class: "tap", "data-pair": `${a + 1}-${b + 1}`, onclick: () => tap(a === selected ? b : a),
      });
      picture.append(titled(cell, `heads ${a + 1} and ${b + 1}: ${value.toFixed(3)}`));
      if (side >= 30) {
        const dark = value > 0.55 ? "fill:var(--card)" : "fill:var(--ink)";
        const number = text(left + (j + 0.5) * side, top + (i + 0.5) * side + 4, value.toFixed(2));
        number.setAttribute("style", `${dark};pointer-events:none`);
        picture.append(number);
      }
    });
  });
  const index = order.indexOf(selected);
  picture.append(make("rect", { x: left, y: top + index * side, width: side * count, height: side, fill: "none", style: "stroke:var(--c1)", "stroke-width": 2, rx: 3, "pointer-events": "none" }));
  const x = left + side * count + 16, height = side * count;
  for (let n = 0; n < 40; n += 1) {
    picture.append(make("rect", { x, y: top + (height * n) / 40, width: 10, height: height / 40 + 0.5, style: `fill:color-mix(in oklab, var(--heat-high) ${100 - 2.5 * n}%, var(--heat-low))` }));
  }
  picture.append(text(x + 15, top + 9, "1", "start"), text(x + 15, top + height, "0", "start"));
  return picture;
}

// Lines: series of { name, label, fill, dash, points: [[x, y]] }. Lines that coincide stay visible: later ones are
// thinner and dashed, and each has its label at its end.
function lines(series, { logarithmic = false, zero = false, across = "", label = "" } = {}) {
  const height = 220, bottom = 40, top = 10, right = 12 + textWidth(series.map((line) => line.label));
  const points = series.flatMap((line) => line.points);
  const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
  const scale = (value) => (logarithmic ? Math.log2(value) : value);
  const [x0, x1] = [scale(Math.min(...xs)), scale(Math.max(...xs))];
  let [y0, y1] = [zero ? 0 : Math.min(...ys), Math.max(...ys)];
  if (y1 === y0) [y0, y1] = [zero ? 0 : y0 - 0.1 * Math.abs(y0), y1 + (0.1 * Math.abs(y1) || 1)];
  const rows = ticks(y0, y1), rowNames = tickLabels(rows), left = Math.max(46, 10 + textWidth(rowNames));
  const x = (value) => left + ((WIDTH - left - right) * (scale(value) - x0)) / (x1 - x0 || 1);
  const y = (value) => top + (height - top - bottom) * (1 - (value - y0) / (y1 - y0));
  const picture = canvas(height, label);
  rows.forEach((t, n) => {
    picture.append(make("line", { class: "grid", x1: left, x2: WIDTH - right, y1: y(t), y2: y(t) }), text(left - 6, y(t) + 4, rowNames[n], "end"));
  });
  const marks = logarithmic ? [...new Set(xs)].sort((a, b) => a - b) : ticks(x0, x1, 4), markNames = tickLabels(marks);
  marks.forEach((t, n) => picture.append(text(x(t), height - 22, markNames[n])));
  picture.append(text((left + WIDTH - right) / 2, height - 5, across));
  series.forEach((line, n) => {
    const path = line.points.map((p, m) => `${m ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    const width = Math.min(7, 2 + 2 * (series.length - 1 - n));
    picture.append(make("path", { d: path, fill: "none", style: `stroke:${line.fill}`, "stroke-width": width, "stroke-dasharray": line.dash || null, "stroke-linejoin": "round" }));
    // Many markers would hide the dashes.
    if (line.points.length <= 8) {
      for (const p of line.points) picture.append(make("circle", { cx: x(p[0]), cy: y(p[1]), r: 2 + width / 2, style: `fill:${line.fill}` }));
    }
  });
  // Points are larger for a finger than they look.
  for (const line of series) {
    if (line.points.length > 40) continue;
    for (const p of line.points) {
      const same = series.filter((other) => other.points.some((q) => q[0] === p[0] && Math.abs(y(q[1]) - y(p[1])) < 4));
      const values = same.map((other) => `${other.name} ${short(other.points.find((q) => q[0] === p[0])[1], 6)}`).join("; ");
      picture.append(titled(make("circle", { cx: x(p[0]), cy: y(p[1]), r: 9, fill: "transparent" }), `${across} ${short(p[0])}: ${values}`));
    }
  }
  const ends = series.map((line) => ({ line, y: y(line.points.at(-1)[1]) + 4 })).sort((a, b) => a.y - b.y);
  ends.forEach((end, n) => { if (n) end.y = Math.max(end.y, ends[n - 1].y + 12); });
  const excess = Math.max(0, (ends.at(-1)?.y ?? 0) - (height - bottom + 4));
  for (const { line, y: row } of ends) {
    const name = text(WIDTH - right + 8, row - excess, line.label, "start", "end-label");
    name.setAttribute("style", `fill:${line.fill}`);
    picture.append(name);
  }
  return picture;
}

// Shares of components along a sequence: [M][positions], stacked.
function strip(shares, name, label) {
  const height = 84, left = 52, top = 6, stripHeight = 52;
  const picture = canvas(height, label);
  const positions = shares[0].length, width = (WIDTH - left) / positions;
  picture.append(text(left - 6, top + stripHeight / 2 + 4, name, "end"));
  for (let n = 0; n < positions; n += 1) {
    let y = top;
    shares.forEach((row, r) => {
      const part = stripHeight * row[n];
      picture.append(make("rect", { x: left + n * width, width: width + 0.3, y, height: part, style: `fill:${colour(r)}` }));
      y += part;
    });
  }
  return picture;
}

function table(columns, rows) {
  const line = (cells, kind) => make("tr", {}, ...cells.map((cell) => make(kind, {}, String(cell))));
  const body = rows.map(({ cells, marked }) => {
    const row = line(cells, "td");
    if (marked) row.className = "marked";
    return row;
  });
  return make("table", {}, make("thead", {}, line(columns, "th")), make("tbody", {}, ...body));
}

// A table that scrolls sideways; a hint is visible while columns are hidden.
const overflow = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const box = target.closest(".scroll");
    box.parentElement.classList.toggle("overflows", box.scrollWidth > box.clientWidth + 1);
  }
});
function scrollable(content, label) {
  const box = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, content);
  const frame = make("div", { class: "scroll-frame" }, make("p", { class: "hint" }, "More columns: scroll sideways →"), box);
  for (const node of [box, content]) overflow.observe(node);
  return frame;
}
