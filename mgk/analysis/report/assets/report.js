"use strict";
const state = { model: 0, layer: 0, head: 0, pooling: "mean", measure: "maps", tile: 0 };
const at = (id) => document.getElementById(id);
const fill = (id, ...children) => at(id).replaceChildren(...children);
const model = () => DATA.models[state.model];
const layer = () => model().layers[state.layer];
const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)} %`;
const COLOURS = Uint8Array.from(atob(DATA.palette), (c) => c.charCodeAt(0));
const MEASURES = {
  maps: ["where they look (Jensen–Shannon)", "1 minus the Jensen–Shannon divergence between rows, in bits", (l) => l.divergence.map((row) => row.map((v) => 1 - v))],
  cosine: ["where they look (cosine)", "cosine of the maps as vectors", (l) => l.cosine],
  outputs: ["what they pass on (CKA)", "centred kernel alignment of the heads' outputs", (l) => l.cka],
};

// Maps. A picture of levels becomes one of colours; levels are kept for the readout.
const decoded = new Map();
async function levels(uri) {
  if (!decoded.has(uri)) {
    const image = new Image();
    image.src = uri;
    await image.decode();
    const sheet = document.createElement("canvas");
    [sheet.width, sheet.height] = [image.width, image.height];
    const brush = sheet.getContext("2d", { willReadFrequently: true });
    brush.drawImage(image, 0, 0);
    const pixels = brush.getImageData(0, 0, image.width, image.height);
    const found = new Uint8Array(image.width * image.height);
    for (let n = 0; n < found.length; n += 1) found[n] = pixels.data[4 * n];
    decoded.set(uri, { width: image.width, height: image.height, found });
  }
  return decoded.get(uri);
}

async function paint(canvas, uri) {
  canvas.dataset.wanted = uri;
  const { width, height, found } = await levels(uri);
  if (canvas.dataset.wanted !== uri) return;
  [canvas.width, canvas.height] = [width, height];
  const brush = canvas.getContext("2d");
  const pixels = brush.createImageData(width, height);
  for (let n = 0; n < found.length; n += 1) {
    for (let c = 0; c < 3; c += 1) pixels.data[4 * n + c] = COLOURS[3 * found[n] + c];
    pixels.data[4 * n + 3] = 255;
  }
  brush.putImageData(pixels, 0, 0);
  canvas.dataset.painted = uri;
}

const weight = (level, keys) =>
  level === 0 ? 0 : 10 ** (DATA.lowest + ((level - 1) / 254) * (Math.log10(keys) - DATA.lowest)) / keys;

function span(first, factor, total, names) {
  const last = Math.min(first + factor, total) - 1;
  if (last > first) return `${first + 1}–${last + 1}`;
  return names[first] ? `${first + 1} “${names[first]}”` : `${first + 1}`;
}

async function read(event) {
  const maps = layer().maps, box = at("map").getBoundingClientRect();
  const { width, height, found } = await levels(maps.pooled[state.pooling][state.head]);
  const column = Math.min(width - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * width)));
  const row = Math.min(height - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * height)));
  const value = weight(found[row * width + column], maps.keys);
  const self = maps.queries === maps.keys ? model().tokens : [];
  const query = span(row * maps.factor, maps.factor, maps.queries, self);
  const key = span(column * maps.factor, maps.factor, maps.keys, self);
  const how = maps.factor > 1 ? `${state.pooling} ` : "";
  at("readout").textContent = `query ${query} → key ${key}: ${how}weight ${value ? value.toPrecision(2) : "below the scale or none"}${value ? `, ${(value * maps.keys).toPrecision(2)} × uniform` : ""}`;
  return [row, column];
}

async function choose(event) {
  const [row, column] = await read(event);
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
  const [[up, tall], [left, wide]] = [edge(row, maps.queries), edge(column, maps.keys)];
  Object.assign(at("frame").style, { top: `${up}%`, height: `${tall}%`, left: `${left}%`, width: `${wide}%` });
  at("tile-title").textContent = `In full: queries ${range(row, maps.queries)}, keys ${range(column, maps.keys)}`;
  at("tile").hidden = !uri;
  if (uri) at("tile").src = uri;
  at("tile").alt = `attention of queries ${range(row, maps.queries)} to keys ${range(column, maps.keys)}`;
  at("tile-about").textContent = uri ? "One pixel a pair. Tap the map to see another part." : "No attention here. Tap the map to see another part.";
}

function drawMaps() {
  const one = layer(), maps = one.maps;
  const size = `${maps.queries} queries (down) × ${maps.keys} keys (across)`;
  const pooled = maps.factor > 1 ? ` One pixel is the ${state.pooling} of ${maps.factor} × ${maps.factor} pairs; the part in full is beside it.` : " One pixel a pair.";
  at("maps-about").textContent = `The sample shown has ${size}.${pooled}`;
  at("pooling-choice").hidden = maps.factor === 1;
  at("map-title").textContent = `Layer ${state.layer + 1}, head ${state.head + 1}`;
  at("map").setAttribute("aria-label", `attention map of layer ${state.layer + 1}, head ${state.head + 1}`);
  const uris = maps.pooled[state.pooling];
  fill("thumbs", ...uris.map((uri, head) => {
    const small = make("canvas");
    paint(small, uri);
    return make("button", { type: "button", "aria-pressed": head === state.head, "aria-label": `head ${head + 1}`, onclick: () => pick({ head }) }, small, `head ${head + 1}`);
  }));
  paint(at("map"), uris[state.head]);
  const stops = Array.from({ length: 12 }, (_, n) => { const c = Math.round((n / 11) * 255) * 3; return `rgb(${COLOURS[c]},${COLOURS[c + 1]},${COLOURS[c + 2]})`; });
  const bar = make("i");
  bar.style.background = `linear-gradient(90deg, ${stops.join(",")})`;
  const uniform = make("span", {}, "1/keys: uniform");
  uniform.style.left = `${(-100 * DATA.lowest) / (Math.log10(maps.keys) - DATA.lowest)}%`;
  fill("scale", bar, make("div", {}, make("span", {}, "0"), uniform, make("span", {}, "1")));
  at("readout").textContent = "Point at the map to read it.";
  drawFacts();
  drawTile();
}

function drawFacts() {
  const one = layer(), head = state.head, entries = [];
  const others = one.divergence[head].map((value, n) => [value, n]).filter(([, n]) => n !== head).sort((a, b) => a[0] - b[0]);
  if (others.length) entries.push(["most like", `head ${others[0][1] + 1} (similarity ${(1 - others[0][0]).toFixed(2)})`], ["least like", `head ${others.at(-1)[1] + 1} (${(1 - others.at(-1)[0]).toFixed(2)})`]);
  const own = one.ranks.rank.map((_, n) => n).filter((n) => one.ranks.head[n] === head);
  const mean = (values) => own.reduce((sum, n) => sum + values[n] / one.ranks.size[n], 0) / own.length;
  if (own.length) entries.push(["rank", `${percent(mean(one.ranks.rank))} of the size, effective ${percent(mean(one.ranks.effective))}`]);
  const removal = one.removal;
  if (removal) entries.push(["silenced", removal.flipped ? `${percent(removal.flipped[head], 1)} of predictions change` : `the output moves by ${percent(removal.change[head], 1)}`]);
  fill("facts", ...entries.flatMap(([word, words]) => [make("dt", {}, word), make("dd", {}, words)]));
}

function drawSimilarity() {
  const one = layer(), [, about, matrix] = MEASURES[state.measure];
  at("measure-about").textContent = about;
  fill("similarity", heat(matrix(one), one.order, state.head, (head) => pick({ head }), "similarity of heads"));
  const groups = new Set(one.groups).size;
  const alike = groups < one.heads ? ` ${one.heads} heads in ${groups} group${groups === 1 ? "" : "s"} closer than ${DATA.same_group} bits.` : "";
  at("similarity-about").textContent = `Layer ${state.layer + 1}: ${one.different[state.measure].toFixed(2)} of ${one.heads} heads effectively different. Similar heads stand side by side.${alike} Tap a cell to choose its head.`;
  const items = model().layers.map((l, n) => ({ label: n + 1, parts: [{ value: l.different[state.measure], fill: "var(--c0)", words: `layer ${n + 1}: ${l.different[state.measure].toFixed(2)} of ${l.heads}` }] }));
  const most = Math.max(...model().layers.map((l) => l.heads));
  fill("different", bars(items, { high: most, reference: most, chosen: state.layer, tap: (n) => pick({ layer: n }), label: "different heads by layer" }));
}

function drawRanks() {
  const ranks = layer().ranks;
  at("ranks").closest("section").hidden = !ranks.rank.length;
  const own = ranks.head.map((head) => head === state.head);
  const even = new Set(ranks.size).size === 1;
  const high = even ? ranks.size[0] : 100;
  const place = (values) => values.map((value, n) => (even ? value : (100 * value) / ranks.size[n]));
  const draw = (id, values, label) => {
    const all = place(values);
    fill(id, histogram(all, all.filter((_, n) => own[n]), high, { unit: even ? "" : " %", label }),
      legend([["all heads of the layer", "color-mix(in srgb, var(--quiet) 35%, transparent)"], [`head ${state.head + 1}`, "var(--c0)"]]));
  };
  draw("ranks", ranks.rank, "histogram of ranks");
  draw("effective", ranks.effective, "histogram of effective ranks");
  const middle = [...place(ranks.rank)].sort((a, b) => a - b)[Math.floor(ranks.rank.length / 2)];
  at("ranks-about").textContent = `Singular values above ${model().threshold.toExponential()}, ${ranks.rank.length} matrices of layer ${state.layer + 1}, ${even ? `of size ${high}` : "in per cent of the matrix's size"}; median ${even ? middle : short(middle)}${even ? "" : " %"}.`;
}

function drawMixture() {
  const one = layer(), found = one.mixture;
  at("mixture-section").hidden = !found;
  if (!found) return;
  const items = found.prior[state.head].map((prior, r) => ({
    label: `component ${r + 1}`,
    parts: [
      { value: prior, fill: `color-mix(in srgb, ${colour(r)} 45%, var(--card))`, words: `prior ${percent(prior, 1)}` },
      { value: found.answered[state.head][r], fill: colour(r), words: `answers for ${percent(found.answered[state.head][r], 1)}` },
    ],
  }));
  fill("components", bars(items, { high: 1, format: (v) => percent(v), label: "priors and shares of components" }), legend([["prior (pale)", "color-mix(in srgb, var(--quiet) 35%, transparent)"], ["answers for", "var(--quiet)"]]));
  fill("where", strip(one.usage.queries[state.head], "queries", "components along the queries"), strip(one.usage.keys[state.head], "keys", "components along the keys"),
    legend(found.prior[state.head].map((_, r) => [`component ${r + 1}`, colour(r)])));
  const rows = found.decided.map((decided, head) => {
    const apart = found.distance[head].flatMap((row, r) => row.slice(r + 1));
    return { own: head === state.head, cells: [`head ${head + 1}`, found.prior[head].map((p) => p.toFixed(2)).join(" / "), found.answered[head].map((p) => p.toFixed(2)).join(" / "), short(Math.min(...apart)), percent(decided), percent(found.other_choice[head], 1), percent(found.moved[head], 1)] };
  });
  fill("mixture-table", table(["", "prior", "answers for", "distance of keys, σ", "leading component", "hard choice differs", "attention moved by hard/soft"], rows));
}

function drawRemoval() {
  const layers = model().layers, present = layers.every((l) => l.removal);
  at("removal-section").hidden = !present;
  if (!present) return;
  const show = (id, name) => {
    const most = Math.max(1e-3, ...layers.flatMap((l) => l.removal[name]));
    const items = layer().removal[name].map((value, head) => ({ label: head + 1, parts: [{ value, fill: "var(--c0)", words: `head ${head + 1}: ${percent(value, 1)}` }] }));
    fill(id, bars(items, { high: most, format: (v) => percent(v, most < 0.05 ? 1 : 0), chosen: state.head, tap: (head) => pick({ head }), label: "effect of silencing a head" }));
  };
  at("flipped-figure").hidden = !layer().removal.flipped;
  if (layer().removal.flipped) show("flipped", "flipped");
  show("moved", "change");
}

function drawCosts() {
  const { costs, own } = model();
  at("cost-section").hidden = !costs.length;
  if (!costs.length) return;
  const length = own ? own.length : Math.max(...costs.map((c) => c.length));
  const here = costs.filter((c) => c.length === length);
  const variants = [...new Set(here.map((c) => c.variant))];
  const series = (measure) => variants.map((name, n) => ({ name, fill: colour(n), points: here.filter((c) => c.variant === name).map((c) => [c.heads, c[measure]]) }));
  const names = legend(variants.map((name, n) => [name, colour(n)]));
  const style = { logarithmic: true, zero: true, across: "heads" };
  fill("flops", lines(series("flops"), { ...style, label: "FLOPs against heads" }), names);
  fill("params", lines(series("params"), { ...style, label: "parameters against heads" }), names.cloneNode(true));
  at("flops-about").textContent = `FLOPs of one forward at ${length} tokens, counted on the meta device.`;
  const change = (value, base) => {
    if (!base) return "";
    const rounded = Math.round((100 * (value - base)) / base);
    return rounded === 0 ? "the same" : `${rounded < 0 ? "−" : "+"}${Math.abs(rounded)} %`;
  };
  const rows = here.map((c) => ({ own: own && c.variant === own.variant && c.heads === own.heads, cells: [`${c.variant}, ${c.heads} head${c.heads === 1 ? "" : "s"}`, c.params.toLocaleString("en"), change(c.params, own?.params), `${(c.flops / 1e9).toPrecision(3)} G`, change(c.flops, own?.flops)] }));
  fill("cost-table", table(["", "parameters", "against this model", "FLOPs", "against this model"], rows));
}

function drawCurves() {
  at("curve-section").hidden = !DATA.curves.length;
  const runs = [...new Set(DATA.curves.map((c) => c.run))];
  const panels = [...new Set(DATA.curves.map((c) => `${c.metric}, ${c.split}`))];
  fill("curves", ...panels.map((panel) => {
    const found = DATA.curves.filter((c) => `${c.metric}, ${c.split}` === panel);
    const series = found.map((c) => ({ name: c.run, fill: colour(runs.indexOf(c.run)), points: c.steps.map((s, n) => [s, c.values[n]]) }));
    return make("figure", {}, make("h3", {}, panel), lines(series, { across: "step", label: panel }), legend(found.map((c) => [c.run, colour(runs.indexOf(c.run))])));
  }));
}

function drawVerdict() {
  const one = model();
  at("subject").textContent = `${one.name} · ${one.about}`;
  at("headline").textContent = one.headline;
  fill("sentences", ...one.sentences.map((sentence) => make("li", {}, sentence)));
  const shares = one.layers.flatMap((l) => l.ranks.rank.map((r, n) => r / l.ranks.size[n])).sort((a, b) => a - b);
  const figures = [["heads", `${one.heads}`, `in ${one.layers.length} layer${one.layers.length === 1 ? "" : "s"}`], ["different by where they look", one.different.maps.toFixed(1), ""]];
  if (one.different.outputs) figures.push(["different by what they pass on", one.different.outputs.toFixed(1), ""]);
  if (shares.length) figures.push(["median rank", percent(shares[Math.floor(shares.length / 2)]), "of the size"]);
  fill("figures", ...figures.map(([words, value, more]) => make("div", {}, make("b", {}, value, " ", make("small", {}, more)), make("span", { class: "quiet" }, words))));
}

function options(id, entries, chosen) {
  fill(id, ...entries.map(([value, words]) => {
    const option = make("option", { value }, words);
    option.selected = String(value) === String(chosen);
    return option;
  }));
}

function draw() {
  const one = layer();
  document.title = `${model().name}: what the heads do`;
  document.querySelectorAll("#models button").forEach((button, n) => button.setAttribute("aria-selected", n === state.model));
  options("layer", model().layers.map((l, n) => [n, `${n + 1}`]), state.layer);
  options("head", Array.from({ length: one.heads }, (_, n) => [n, `${n + 1}`]), state.head);
  options("measure", Object.entries(MEASURES).filter(([key]) => one.different[key] !== undefined).map(([key, [words]]) => [key, words]), state.measure);
  at("kind").textContent = `${one.name}: ${one.kind}`;
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
  if (change.model !== undefined) { drawVerdict(); drawCosts(); }
  draw();
}

function notes() {
  const entries = [
    ["Effectively different", "From 1 (all heads the same) to the number of heads (none alike): the exponential of the entropy of the eigenvalues of the similarity matrix over the number of heads. For the model, the sum over layers."],
    ["Jensen–Shannon", "How far apart two heads' rows are as distributions, in bits: 0 the same, 1 nothing in common; the mean over rows and samples. Rows that see one key alone are left out."],
    ["CKA", "Whether two heads' outputs over all tokens are the same up to rotation and scale. With few tokens it is too high."],
    ["Rank", "The number of singular values above the threshold. Weights are computed again in double precision; padding is left out."],
    ["Colours", "The weight of a pair in a logarithmic scale from a tenth of 1/keys to 1, the same for all heads, layers and models."],
    ["Responsibility", "Which component of a key's mixture answers for a query (Eq. 11 of the paper), weighted by the attention that the pair gets. The hard choice is the nearest component, without prior (Eq. 12)."],
  ];
  fill("notes", ...entries.flatMap(([word, words]) => [make("dt", {}, word), make("dd", {}, words)]));
  const links = DATA.files.flatMap((name, n) => [n ? ", " : "", make("a", { href: name }, name)]);
  fill("footer", make("p", {}, `mgk ${DATA.version} · ${DATA.command}`), ...(links.length ? [make("p", {}, "Beside this page: ", ...links)] : []));
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
}

if (DATA.models.length > 1) {
  fill("models", ...DATA.models.map((one, n) => make("button", { type: "button", role: "tab", onclick: () => pick({ model: n }) }, one.name)));
}
for (const name of ["layer", "head"]) at(name).addEventListener("change", (event) => pick({ [name]: Number(event.target.value) }));
for (const name of ["pooling", "measure"]) at(name).addEventListener("change", (event) => pick({ [name]: event.target.value }));
at("map").addEventListener("pointermove", read);
at("map").addEventListener("click", choose);
at("theme").addEventListener("click", theme);
notes();
drawCurves();
pick({ model: 0 });
