"use strict";
const state = { model: 0, layer: 0, head: 0, pooling: "mean", measure: "maps", tile: 0 };
const at = (id) => document.getElementById(id);
const fill = (id, ...children) => at(id).replaceChildren(...children);
const model = () => DATA.models[state.model];
const layer = () => model().layers[state.layer];
const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)} %`;
const variantColour = (name) => `color-mix(in oklab, ${DATA.colours[name] ?? DATA.colours[""]} var(--pure), white)`;
const definitions = (entries) => entries.flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)]);
const COLOURS = Uint8Array.from(atob(DATA.palette), (c) => c.charCodeAt(0));
const MEASURES = {
  maps: ["attention maps (Jensen–Shannon)", "1 minus the Jensen–Shannon divergence between rows, in bits", (l) => l.divergence.map((row) => row.map((v) => 1 - v))],
  cosine: ["attention maps (cosine)", "cosine of the maps as vectors", (l) => l.cosine],
  outputs: ["outputs (CKA)", "centred kernel alignment of the heads' outputs", (l) => l.cka],
};

// Maps are grey images of levels; they are coloured here, and their levels are cached for the readout.
const decoded = new Map();
async function levels(uri) {
  if (!decoded.has(uri)) {
    const image = new Image();
    image.src = uri;
    await image.decode();
    const source = document.createElement("canvas");
    [source.width, source.height] = [image.width, image.height];
    const context = source.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, image.width, image.height);
    const values = new Uint8Array(image.width * image.height);
    for (let n = 0; n < values.length; n += 1) values[n] = pixels.data[4 * n];
    decoded.set(uri, { width: image.width, height: image.height, values });
  }
  return decoded.get(uri);
}

async function paint(canvas, uri) {
  canvas.dataset.requested = uri;
  const { width, height, values } = await levels(uri);
  if (canvas.dataset.requested !== uri) return;
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  for (let n = 0; n < values.length; n += 1) {
    for (let c = 0; c < 3; c += 1) pixels.data[4 * n + c] = COLOURS[3 * values[n] + c];
    pixels.data[4 * n + 3] = 255;
  }
  context.putImageData(pixels, 0, 0);
  canvas.dataset.painted = uri;
}

const weight = (level, keys) =>
  level === 0 ? 0 : 10 ** (DATA.lowest + ((level - 1) / 254) * (Math.log10(keys) - DATA.lowest)) / keys;

function span(first, factor, total, names) {
  const last = Math.min(first + factor, total) - 1;
  if (last > first) return `${first + 1}–${last + 1}`;
  return names[first] ? `${first + 1} “${names[first]}”` : `${first + 1}`;
}

async function showWeight(event) {
  const maps = layer().maps, box = at("map").getBoundingClientRect();
  const { width, height, values } = await levels(maps.pooled[state.pooling][state.head]);
  const column = Math.min(width - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * width)));
  const row = Math.min(height - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * height)));
  const value = weight(values[row * width + column], maps.keys);
  const self = maps.queries === maps.keys ? model().tokens : [];
  const query = span(row * maps.factor, maps.factor, maps.queries, self);
  const key = span(column * maps.factor, maps.factor, maps.keys, self);
  const pooling = maps.factor > 1 ? `${state.pooling} ` : "";
  at("readout").textContent = `query ${query} → key ${key}: ${pooling}weight ${value ? value.toPrecision(2) : "0"}${value ? `, ${(value * maps.keys).toPrecision(2)} × uniform` : ""}`;
  return [row, column];
}

async function selectTile(event) {
  const [row, column] = await showWeight(event);
  const maps = layer().maps;
  if (!maps.tiles.length) return;
  const cells = DATA.tile / maps.factor;
  state.tile = Math.floor(row / cells) * maps.columns + Math.floor(column / cells);
  drawTile();
}

function drawTile() {
  const maps = layer().maps;
  at("detail").hidden = at("frame").hidden = !maps.tiles.length;
  if (!maps.tiles.length) return;
  const uri = maps.tiles[state.head][state.tile];
  const [row, column] = [Math.floor(state.tile / maps.columns), state.tile % maps.columns];
  const range = (n, total) => `${n * DATA.tile + 1}–${Math.min(total, (n + 1) * DATA.tile)}`;
  const edge = (n, total) => [(100 * n * DATA.tile) / total, (100 * Math.min(DATA.tile, total - n * DATA.tile)) / total];
  const [[top, height], [left, width]] = [edge(row, maps.queries), edge(column, maps.keys)];
  Object.assign(at("frame").style, { top: `${top}%`, height: `${height}%`, left: `${left}%`, width: `${width}%` });
  at("tile-title").textContent = `Full resolution: queries ${range(row, maps.queries)}, keys ${range(column, maps.keys)}`;
  at("tile").hidden = !uri;
  if (uri) at("tile").src = uri;
  at("tile").alt = `attention of queries ${range(row, maps.queries)} to keys ${range(column, maps.keys)}`;
  at("tile-about").textContent = uri ? "One pixel per pair. Tap the map to select another part." : "All weights are 0 here. Tap the map to select another part.";
}

function drawMaps() {
  const maps = layer().maps;
  const size = `${maps.queries} queries (down) × ${maps.keys} keys (across)`;
  const pooled = maps.factor > 1 ? ` One pixel is the ${state.pooling} of ${maps.factor} × ${maps.factor} pairs; one part is also shown at full resolution.` : " One pixel per pair.";
  at("maps-about").textContent = `First sample: ${size}.${pooled}`;
  at("pooling-choice").hidden = maps.factor === 1;
  at("map-title").textContent = `Layer ${state.layer + 1}, head ${state.head + 1}`;
  at("map").setAttribute("aria-label", `attention map of layer ${state.layer + 1}, head ${state.head + 1}`);
  const uris = maps.pooled[state.pooling];
  fill("thumbs", ...uris.map((uri, head) => {
    const thumbnail = make("canvas");
    paint(thumbnail, uri);
    return make("button", { type: "button", "aria-pressed": head === state.head, "aria-label": `head ${head + 1}`, onclick: () => pick({ head }) }, thumbnail, `head ${head + 1}`);
  }));
  paint(at("map"), uris[state.head]);
  const stops = Array.from({ length: 12 }, (_, n) => { const c = Math.round((n / 11) * 255) * 3; return `rgb(${COLOURS[c]},${COLOURS[c + 1]},${COLOURS[c + 2]})`; });
  const bar = make("i");
  bar.style.background = `linear-gradient(90deg, ${stops.join(",")})`;
  const uniform = make("span", {}, "1/keys: uniform");
  uniform.style.left = `${(-100 * DATA.lowest) / (Math.log10(maps.keys) - DATA.lowest)}%`;
  fill("scale", bar, make("div", {}, make("span", {}, "0"), uniform, make("span", {}, "1")));
  at("readout").textContent = "Tap the map, or point at it, to read a weight.";
  drawFacts();
  drawTile();
}

function drawFacts() {
  const current = layer(), head = state.head, entries = [];
  const neighbours = current.divergence[head].map((value, n) => [value, n]).filter(([, n]) => n !== head).sort((a, b) => a[0] - b[0]);
  if (neighbours.length) entries.push(["most similar", `head ${neighbours[0][1] + 1} (similarity ${(1 - neighbours[0][0]).toFixed(2)})`], ["least similar", `head ${neighbours.at(-1)[1] + 1} (${(1 - neighbours.at(-1)[0]).toFixed(2)})`]);
  const indices = current.ranks.rank.map((_, n) => n).filter((n) => current.ranks.head[n] === head);
  const mean = (values) => indices.reduce((sum, n) => sum + values[n] / current.ranks.size[n], 0) / indices.length;
  if (current.concentration) entries.push(["from uniform", `${current.concentration[head].toFixed(2)} bits${current.concentration[head] < DATA.nearly_uniform ? ": nearly uniform attention" : ""}`]);
  if (indices.length) entries.push(["rank", `${percent(mean(current.ranks.rank))} of the size, effective ${percent(mean(current.ranks.effective))}`]);
  const removal = current.removal;
  if (removal) entries.push(["removed", removal.flipped ? `${percent(removal.flipped[head], 1)} of the predictions change` : `the output changes by ${percent(removal.change[head], 1)}`]);
  fill("facts", ...definitions(entries));
}

function drawSimilarity() {
  const current = layer(), [, about, matrix] = MEASURES[state.measure];
  at("measure-about").textContent = about;
  fill("similarity", heat(matrix(current), current.order, state.head, (head) => pick({ head }), "similarity of heads"));
  const groups = new Set(current.groups).size;
  const grouped = groups < current.heads ? ` ${current.heads} heads form ${groups} group${groups === 1 ? "" : "s"} of maps closer than ${DATA.same_group} bits.` : "";
  at("similarity-about").textContent = `Layer ${state.layer + 1}: ${current.different[state.measure].toFixed(2)} of ${current.heads} heads are effectively different. Similar heads are next to each other.${grouped} Tap a cell to select its head.`;
  const items = model().layers.map((l, n) => ({ label: n + 1, parts: [{ value: l.different[state.measure], fill: "var(--c0)", title: `layer ${n + 1}: ${l.different[state.measure].toFixed(2)} of ${l.heads}` }] }));
  const most = Math.max(...model().layers.map((l) => l.heads));
  fill("different", bars(items, { high: most, reference: most, selected: state.layer, tap: (n) => pick({ layer: n }), label: "different heads by layer" }));
}

function drawRanks() {
  const ranks = layer().ranks;
  at("ranks").closest("section").hidden = !ranks.rank.length;
  const selected = ranks.head.map((head) => head === state.head);
  const sameSize = new Set(ranks.size).size === 1;
  const high = sameSize ? ranks.size[0] : 100;
  const scaled = (values) => values.map((value, n) => (sameSize ? value : (100 * value) / ranks.size[n]));
  const draw = (id, values, label) => {
    const all = scaled(values);
    fill(id, histogram(all, all.filter((_, n) => selected[n]), high, { unit: sameSize ? "" : " %", label }),
      legend([["all heads of the layer", "color-mix(in srgb, var(--quiet) 35%, transparent)"], [`head ${state.head + 1}`, "var(--c0)"]]));
  };
  draw("ranks", ranks.rank, "histogram of ranks");
  draw("effective", ranks.effective, "histogram of effective ranks");
  const median = [...scaled(ranks.rank)].sort((a, b) => a - b)[Math.floor(ranks.rank.length / 2)];
  at("ranks-about").textContent = `Rank: the number of singular values above ${model().threshold.toExponential()}. ${ranks.rank.length} matrices of layer ${state.layer + 1}, ${sameSize ? `of size ${high}` : "in per cent of the matrix size"}; median ${sameSize ? median : short(median)}${sameSize ? "" : " %"}.`;
}

function drawMixture() {
  const { mixture, usage } = layer();
  at("mixture-section").hidden = !mixture;
  if (!mixture) return;
  const items = mixture.prior[state.head].map((prior, r) => ({
    label: `component ${r + 1}`,
    parts: [
      { value: prior, fill: `color-mix(in srgb, ${colour(r)} 45%, var(--card))`, title: `prior ${percent(prior, 1)}` },
      { value: mixture.answered[state.head][r], fill: colour(r), title: `share of attention ${percent(mixture.answered[state.head][r], 1)}` },
    ],
  }));
  fill("components", bars(items, { high: 1, suffix: " %", label: "priors and shares of components" }), legend([["prior (pale)", "color-mix(in srgb, var(--quiet) 35%, transparent)"], ["share of attention", "var(--quiet)"]]));
  fill("usage", strip(usage.queries[state.head], "queries", "components along the queries"), strip(usage.keys[state.head], "keys", "components along the keys"),
    legend(mixture.prior[state.head].map((_, r) => [`component ${r + 1}`, colour(r)])));
  const rows = mixture.decided.map((decided, head) => {
    const distances = mixture.distance[head].flatMap((row, r) => row.slice(r + 1));
    return { marked: head === state.head, cells: [`head ${head + 1}`, mixture.prior[head].map((p) => p.toFixed(2)).join(" / "), mixture.answered[head].map((p) => p.toFixed(2)).join(" / "), short(Math.min(...distances)), percent(decided), percent(mixture.other_choice[head], 1), percent(mixture.moved[head], 1)] };
  });
  fill("mixture-table", scrollable(table(["", "prior", "share of attention", "distance of keys, σ", "leading component", "hard choice differs", "attention moved, soft/hard"], rows), "mixture components by head"));
}

function drawRemoval() {
  const layers = model().layers, present = layers.every((l) => l.removal);
  at("removal-section").hidden = !present;
  if (!present) return;
  const drawEffect = (id, name) => {
    const most = Math.max(1e-3, ...layers.flatMap((l) => l.removal[name]));
    const items = layer().removal[name].map((value, head) => ({ label: head + 1, parts: [{ value, fill: "var(--c0)", title: `head ${head + 1}: ${percent(value, 1)}` }] }));
    fill(id, bars(items, { high: most, suffix: " %", selected: state.head, tap: (head) => pick({ head }), label: "effect of removing a head" }));
  };
  at("flipped-figure").hidden = !layer().removal.flipped;
  if (layer().removal.flipped) drawEffect("flipped", "flipped");
  drawEffect("moved", "change");
}

function drawCosts() {
  const { costs, cost } = model();
  at("cost-section").hidden = !costs.length;
  if (!costs.length) return;
  const length = cost ? cost.length : Math.max(...costs.map((c) => c.length));
  const compared = costs.filter((c) => c.length === length);
  const variants = [...new Set(compared.map((c) => c.variant))];
  const series = (measure) => variants.map((name, n) => ({ name, label: name, fill: variantColour(name), dash: dash(n), points: compared.filter((c) => c.variant === name).map((c) => [c.heads, c[measure]]) }));
  const names = legend(variants.map((name, n) => [name, variantColour(name), dash(n)]));
  const style = { logarithmic: true, zero: true, across: "heads" };
  fill("flops", lines(series("flops"), { ...style, label: "FLOPs against heads" }), names);
  fill("params", lines(series("params"), { ...style, label: "parameters against heads" }), names.cloneNode(true));
  at("flops-about").textContent = `FLOPs of one forward pass at ${length} tokens, counted on the meta device.`;
  const change = (value, base) => {
    if (!base) return "";
    const rounded = Math.round((100 * (value - base)) / base);
    return rounded === 0 ? "the same" : `${rounded < 0 ? "−" : "+"}${Math.abs(rounded)} %`;
  };
  const rows = compared.map((c) => ({ marked: cost && c.variant === cost.variant && c.heads === cost.heads, cells: [`${c.variant}, ${c.heads} head${c.heads === 1 ? "" : "s"}`, c.params.toLocaleString("en"), change(c.params, cost?.params), `${(c.flops / 1e9).toPrecision(3)} G`, change(c.flops, cost?.flops)] }));
  fill("cost-table", scrollable(table(["", "parameters", "compared with this model", "FLOPs", "compared with this model"], rows), "cost with fewer heads"));
}

function drawCurves() {
  at("curve-section").hidden = !DATA.curves.length;
  const runs = [...new Set(DATA.curves.map((c) => c.run))];
  const panels = [...new Set(DATA.curves.map((c) => `${c.metric}, ${c.split}`))];
  fill("curves", ...panels.map((panel) => {
    const curves = DATA.curves.filter((c) => `${c.metric}, ${c.split}` === panel);
    const style = (run) => [variantColour(DATA.models.find((m) => m.name === run)?.variant), dash(runs.indexOf(run))];
    const number = (run) => (runs.length > 1 ? `${runs.indexOf(run) + 1}` : "");
    const series = curves.map((c) => {
      const [stroke, dashes] = style(c.run);
      return { name: c.run, label: number(c.run), fill: stroke, dash: dashes, points: c.steps.map((s, n) => [s, c.values[n]]) };
    });
    const names = curves.map((c) => [`${number(c.run)} ${c.run}`.trim(), ...style(c.run)]);
    return make("figure", {}, make("h3", {}, panel), lines(series, { across: "step", label: panel }), legend(names));
  }));
}

function drawFindings() {
  const current = model();
  at("about").textContent = `${current.name} · ${current.about}`;
  at("headline").textContent = current.headline;
  fill("sentences", ...current.sentences.map((sentence) => make("li", {}, sentence)));
  at("advice").hidden = !current.advice;
  if (current.advice) fill("advice", make("p", {}, current.advice.sentence), ...(current.advice.command ? [make("pre", {}, current.advice.command)] : []));
  const shares = current.layers.flatMap((l) => l.ranks.rank.map((r, n) => r / l.ranks.size[n])).sort((a, b) => a - b);
  const numbers = [["heads", `${current.heads}`, `in ${current.layers.length} layer${current.layers.length === 1 ? "" : "s"}`], [`different by attention maps${current.chance.maps ? `; unrelated heads: ${current.chance.maps.toFixed(1)}` : ""}`, current.different.maps.toFixed(1), ""]];
  if (current.different.outputs) numbers.push(["different by outputs", current.different.outputs.toFixed(1), ""]);
  if (shares.length) numbers.push(["median rank", percent(shares[Math.floor(shares.length / 2)]), "of the size"]);
  fill("numbers", ...numbers.map(([label, value, note]) => make("div", {}, make("b", {}, value, " ", make("small", {}, note)), make("span", { class: "quiet" }, label))));
}

function options(id, entries, selected) {
  fill(id, ...entries.map(([value, label]) => {
    const option = make("option", { value }, label);
    option.selected = String(value) === String(selected);
    return option;
  }));
}

function draw() {
  const current = layer();
  document.title = `${model().name}: attention heads`;
  document.querySelectorAll("#models button").forEach((button, n) => button.setAttribute("aria-selected", n === state.model));
  options("layer", model().layers.map((l, n) => [n, `${n + 1}`]), state.layer);
  options("head", Array.from({ length: current.heads }, (_, n) => [n, `${n + 1}`]), state.head);
  options("measure", Object.entries(MEASURES).filter(([key]) => current.different[key] !== undefined).map(([key, [label]]) => [key, label]), state.measure);
  at("kind").textContent = `${current.name}: ${current.kind}`;
  drawMaps();
  drawSimilarity();
  drawRanks();
  drawMixture();
  drawRemoval();
}

function pick(change) {
  Object.assign(state, change);
  state.layer = Math.min(state.layer, model().layers.length - 1);
  state.head = Math.min(state.head, layer().heads - 1);
  if (layer().different[state.measure] === undefined) state.measure = "maps";
  if (change.model !== undefined) { drawFindings(); drawCosts(); }
  draw();
}

function notes() {
  const entries = [
    ["Effectively different", "Effective number of different heads, from 1 (all identical) to the number of heads (all different): the exponential of the entropy of the eigenvalues of the similarity matrix divided by the number of heads. For the model, the sum over layers."],
    ["Unrelated heads", "The same number after the weights of each row are shuffled over its visible keys, independently for each head: heads that attend to unrelated keys with attention as concentrated. Similarity beyond that is redundancy; nearly uniform attention allows no verdict."],
    ["Jensen–Shannon", "Divergence between the rows of two heads' maps as distributions, in bits: 0 identical, 1 disjoint; the mean over rows and samples. Rows with a single visible key are excluded."],
    ["CKA", "Centred kernel alignment of two heads' outputs over all tokens: 1 for outputs that are equal up to rotation and scale. It is biased upwards with few tokens."],
    ["Rank", "The number of singular values above the threshold. Weights are recomputed in double precision; padding is excluded."],
    ["Colours", "The weight of a pair on a logarithmic scale from a tenth of 1/keys to 1, the same for all heads, layers and models."],
    ["Share of attention", "The responsibility of a component of a key for a query (Eq. 11 of the paper), weighted by the attention of the pair. The hard choice is the nearest component, without prior (Eq. 12)."],
  ];
  fill("notes", ...definitions(entries));
  const links = DATA.files.flatMap((name, n) => [n ? ", " : "", make("a", { href: name }, name)]);
  fill("footer", make("p", {}, `mgk ${DATA.version} · ${DATA.command}`), ...(links.length ? [make("p", {}, "Other files in this directory: ", ...links)] : []));
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const current = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = current === "dark" ? "light" : "dark";
}

if (DATA.models.length > 1) {
  fill("models", ...DATA.models.map(({ name }, n) => make("button", { type: "button", role: "tab", onclick: () => pick({ model: n }) }, name)));
}
for (const name of ["layer", "head"]) at(name).addEventListener("change", (event) => pick({ [name]: Number(event.target.value) }));
for (const name of ["pooling", "measure"]) at(name).addEventListener("change", (event) => pick({ [name]: event.target.value }));
at("map").addEventListener("pointermove", showWeight);
at("map").addEventListener("click", selectTile);
at("theme").addEventListener("click", theme);
// Touch screens show no tooltips: a tap writes the text of a bar, cell or point below its chart.
document.addEventListener("click", (event) => {
  const path = event.composedPath(), figure = path.find((node) => node.tagName === "FIGURE");
  const title = path[0].querySelector?.(":scope > title");
  if (!figure || !title) return;
  const line = figure.querySelector(".picked") ?? figure.appendChild(make("p", { class: "picked", "aria-live": "polite" }));
  line.textContent = title.textContent;
});
notes();
drawCurves();
pick({ model: 0 });
