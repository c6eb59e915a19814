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

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit) return `${+(value / unit).toPrecision(3)}${letter}`;
  return String(+value.toPrecision(3));
}

function ticks(low, high, count = 4) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const values = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-6; t += step) values.push(+t.toPrecision(12));
  return values;
}

function legend(names) {
  return make("div", { class: "legend" }, ...names.map(([name, fill]) => {
    const key = make("i");
    key.style.background = fill;
    return make("span", {}, key, name);
  }));
}

// Bars: items of { label, parts: [{ value, fill, title }] }, side by side within an item.
function bars(items, { high, format = short, reference = null, selected = -1, tap = null, label = "" } = {}) {
  const height = 190, left = 40, bottom = 26, top = 10;
  const most = high ?? Math.max(1e-12, ...items.flatMap((item) => item.parts.map((part) => part.value)));
  const picture = canvas(height, label);
  const y = (value) => top + (height - top - bottom) * (1 - value / most);
  for (const t of ticks(0, most)) {
    picture.append(make("line", { class: "grid", x1: left, x2: WIDTH, y1: y(t), y2: y(t) }), text(left - 6, y(t) + 4, format(t), "end"));
  }
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
      group.append(titled(bar, part.title ?? `${item.label}: ${format(part.value)}`));
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
  for (const t of ticks(0, most)) {
    picture.append(make("line", { class: "grid", x1: left, x2: WIDTH, y1: y(t), y2: y(t) }), text(left - 6, y(t) + 4, `${t} %`, "end"));
  }
  for (let n = 0; n < bins; n += 1) {
    const range = `${short((n * high) / bins)} to ${short(((n + 1) * high) / bins)}${unit}`;
    const x = left + n * slot;
    picture.append(
      titled(make("rect", { x: x + 0.5, width: slot - 1, y: y(whole[n]), height: y(0) - y(whole[n]), style: "fill:var(--quiet)", opacity: 0.35 }), `all heads, ${range}: ${whole[n].toFixed(1)} %`),
      titled(make("rect", { x: x + slot * 0.25, width: slot * 0.5, y: y(part[n]), height: y(0) - y(part[n]), style: "fill:var(--c0)" }), `this head, ${range}: ${part[n].toFixed(1)} %`),
    );
  }
  for (const t of ticks(0, high, 5)) picture.append(text(left + ((WIDTH - left - right) * t) / high, height - 22, short(t) + unit));
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

// Lines: series of { name, fill, points: [[x, y]] }.
function lines(series, { logarithmic = false, zero = false, across = "", format = short, label = "" } = {}) {
  const height = 220, left = 46, bottom = 40, top = 10, right = 8;
  const points = series.flatMap((line) => line.points);
  const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
  const scale = (value) => (logarithmic ? Math.log2(value) : value);
  const [x0, x1] = [scale(Math.min(...xs)), scale(Math.max(...xs))];
  let [y0, y1] = [zero ? 0 : Math.min(...ys), Math.max(...ys)];
  if (y1 === y0) y1 = y0 + 1;
  const x = (value) => left + ((WIDTH - left - right) * (scale(value) - x0)) / (x1 - x0 || 1);
  const y = (value) => top + (height - top - bottom) * (1 - (value - y0) / (y1 - y0));
  const picture = canvas(height, label);
  for (const t of ticks(y0, y1)) {
    picture.append(make("line", { class: "grid", x1: left, x2: WIDTH - right, y1: y(t), y2: y(t) }), text(left - 6, y(t) + 4, format(t), "end"));
  }
  const marks = logarithmic ? [...new Set(xs)].sort((a, b) => a - b) : ticks(x0, x1, 5);
  for (const t of marks) picture.append(text(x(t), height - 22, short(t)));
  picture.append(text((left + WIDTH) / 2, height - 5, across));
  for (const line of series) {
    const path = line.points.map((p, n) => `${n ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    picture.append(make("path", { d: path, fill: "none", style: `stroke:${line.fill}`, "stroke-width": 2, "stroke-linejoin": "round" }));
    if (line.points.length <= 40) {
      for (const p of line.points) {
        picture.append(titled(make("circle", { cx: x(p[0]), cy: y(p[1]), r: 3.5, style: `fill:${line.fill}` }), `${line.name}, ${across} ${short(p[0])}: ${format(p[1])}`));
      }
    }
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
