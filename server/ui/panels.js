// What the overview says, panel by panel. Each panel is made once and then given new figures, so that a table keeps its
// scrolling and a chart its cursor.

import { Chart, sparkline } from "./charts.js";
import { announce, byId, h, s } from "./dom.js";
import * as format from "./format.js";
import { Table } from "./tables.js";

const TIER_NAMES = { hbm: "GPU memory (hbm)", host: "Host memory", filesystem: "File system" };

// --- tiles: what there is to know at a glance ---

function tile(name, { value, unit = "" }, details, line) {
  const figure = h("span", { class: "figure" }, value, " ", unit ? h("small", null, unit) : null);
  return h("div", { class: "tile" }, h("span", { class: "name" }, name), figure, ...details.map((text) => h("span", { class: "detail" }, text)), line);
}

const known = (value, parts) => (value === null ? { value: format.UNKNOWN } : parts(value));

export function drawTiles({ rates, totals, capacity, read_ceiling_bytes_s: ceiling }, points, gapS) {
  const line = (key, max) => sparkline(points, key, gapS, max);
  const share = ceiling ? `${format.percent(rates.file_read_bytes_s / ceiling)} of the ceiling from files` : "no ceiling measured";
  const fill = capacity.capacity_bytes ? capacity.used_bytes / capacity.capacity_bytes : null;
  byId("tiles").replaceChildren(
    tile("Hit ratio", known(rates.hit_ratio, format.percentParts), [`${format.percent(totals.hit_ratio)} since the engines' start`], line("hit_ratio", 1)),
    tile("Loading", format.rateParts(rates.load_bytes_s), [share], line("load_bytes_s")),
    tile("TTFT saved", known(rates.ttft_saved_s_per_s, (value) => ({ value: format.factor(value), unit: "s each second" })), [totals.ttft_saved_s === null ? "not measured: no prefill was timed yet" : `${format.seconds(totals.ttft_saved_s)} in all`], line("ttft_saved_s_per_s")),
    tile("Reserved", known(fill, format.percentParts), [`${format.size(capacity.used_bytes)} of ${format.size(capacity.capacity_bytes)}`], line("used_bytes", capacity.capacity_bytes)),
    tile("Evicting", format.rateParts(rates.evicted_bytes_s), [`${format.size(totals.evicted_bytes)} in all`], line("evicted_bytes_s")),
  );
}

// --- fill of the tiers ---

function bar({ used, size: whole, pinned = 0, marks = [] }) {
  const part = (bytes) => (whole ? Math.min(100, (bytes / whole) * 100) : 0);
  const isHigh = marks.length > 0 && used / whole > Math.max(...marks);
  return s("svg", { viewBox: "0 0 100 14", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { class: "track", width: 100, height: 14 }),
    s("rect", { class: isHigh ? "used high" : "used", width: part(used), height: 14 }),
    pinned ? s("rect", { class: "pinned", width: part(pinned), height: 14 }) : null,
    marks.map((mark) => s("line", { class: "mark", "vector-effect": "non-scaling-stroke", x1: mark * 100, x2: mark * 100, y1: -3, y2: 17 })));
}

const swatch = (kind) => s("svg", { class: "swatch", viewBox: "0 0 8 8", "aria-hidden": "true" }, s("rect", { class: kind, width: 8, height: 8 }));

function fill(name, drawn, under) {
  const share = drawn.size ? ` (${format.percent(drawn.used / drawn.size)})` : "";
  const words = h("p", { class: "words" }, h("span", null, name), h("span", null, `${format.size(drawn.used)} of ${format.size(drawn.size)}${share}`));
  return h("div", { class: "fill" }, words, bar(drawn), under.map((text) => h("p", { class: "under" }, text)));
}

export function drawTiers({ tiers, capacity }) {
  const rows = tiers.map((tier) => {
    const drawn = { used: tier.used_bytes, size: tier.size_bytes };
    if (tier.tier !== "filesystem") {
      return tier.size_bytes ? fill(TIER_NAMES[tier.tier], drawn, []) : h("div", { class: "fill" }, h("p", { class: "words" }, h("span", null, TIER_NAMES[tier.tier]), h("span", null, "no engine reports any")));
    }
    const { low_watermark: low, high_watermark: high } = capacity;
    Object.assign(drawn, { pinned: capacity.pinned_bytes, marks: [low, high] });
    return fill(TIER_NAMES.filesystem, drawn, [
      `evicts above ${format.percent(high)} down to ${format.percent(low)}`,
      [swatch("pinned"), `${format.size(capacity.pinned_bytes)} pinned`],
      `${format.size(capacity.disk_free_bytes)} free on the disk`,
    ]);
  });
  byId("tiers").replaceChildren(...rows);
}

// --- charts ---

export function makeCharts() {
  const one = (place, name, key, label, parts, how, more = {}) =>
    new Chart(byId(place), { name, series: [{ key, name: label, kind: "first" }], parts, format: how, height: 150, ...more });
  return {
    throughput: new Chart(byId("throughput"), {
      name: "Throughput", parts: format.rateParts, format: format.rate, height: 196, least: 1e6,
      series: [{ key: "load_bytes_s", name: "loaded", kind: "first" }, { key: "save_bytes_s", name: "saved", kind: "second" }],
    }),
    hits: one("hits", "Hit ratio", "hit_ratio", "of the tokens looked up", format.percentParts, format.percent, { max: 1 }),
    saved: one("saved", "Time to first token saved", "ttft_saved_s_per_s", "each second", format.secondsParts, format.seconds),
    eviction: one("eviction", "Eviction", "evicted_bytes_s", "evicted", format.rateParts, format.rate, { least: 1e6 }),
    note: byId("throughput").appendChild(h("p", { class: "note" })),
  };
}

export function drawCharts(charts, { read_ceiling_bytes_s: ceiling }, points, gapS) {
  charts.throughput.update(points, gapS, ceiling ? { value: ceiling, name: `ceiling of the storage ${format.rate(ceiling)}` } : null);
  for (const name of ["hits", "saved", "eviction"]) charts[name].update(points, gapS);
  charts.note.textContent = ceiling
    ? "The ceiling is what the engines' hosts read when they calibrated the storage. Chunks that lie in memory load beyond it."
    : "No engine has calibrated its storage, so there is no ceiling: those without a GPU do not.";
}

// --- tables ---

function copyable(hex) {
  const button = h("button", { type: "button", class: "copy", title: `copy ${hex}`, "aria-label": `copy ${hex}` }, hex.slice(0, 12));
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(hex);
      announce(`copied ${hex}`);
      button.textContent = "copied";
    } catch {
      button.textContent = hex; // a page without TLS may not use the clipboard: so that it can be selected
    }
  });
  return button;
}

const arena = ({ arenas }, tier) => arenas.find((found) => found.tier === tier);
const arenaText = (report, tier) => {
  const found = arena(report, tier);
  return found?.size_bytes ? format.percent(found.used_bytes / found.size_bytes) : format.UNKNOWN;
};

function meter(value, most) {
  return s("svg", { class: "meter", viewBox: "0 0 64 8", "aria-hidden": "true" },
    s("rect", { class: "track", width: 64, height: 8 }), s("rect", { class: "used", width: most ? (64 * value) / most : 0, height: 8 }));
}

function histogram({ counts, bounds_s: bounds }) {
  const most = Math.max(...counts, 1);
  const wide = 100 / counts.length;
  const bars = counts.map((count, n) => {
    const tall = count ? Math.max(1.5, (count / most) * 19) : 0;
    return s("rect", { class: "bars", x: n * wide + 0.5, y: 19 - tall, width: wide - 1, height: tall });
  });
  const words = counts.map((count, n) => (count ? `${n < bounds.length ? `up to ${format.seconds(bounds[n])}` : `over ${format.seconds(bounds.at(-1))}`}: ${format.count(count)}` : "")).filter(Boolean);
  return s("svg", { class: "histogram", viewBox: "0 0 100 20", role: "img", "aria-label": words.join(", ") || "nothing counted" }, s("line", { class: "grid", x1: 0, x2: 100, y1: 19.5, y2: 19.5 }), bars);
}

export function makeTables() {
  return {
    workers: new Table(byId("workers"), "Engines that give signs of life", "No engine reports. Those that use this root and this index appear here within seconds of their start.", [
      { title: "Engine", head: true, show: ({ report }) => [`${report.host} `, h("small", null, `${report.pid}`)] },
      { title: "Model", wrap: true, show: ({ report }) => [report.model || format.UNKNOWN, " ", h("small", null, `${report.engine} ${report.engine_version}`)] },
      { title: "Ranks", number: true, show: ({ report }) => format.count(report.ranks) },
      { title: "Hit ratio", number: true, hint: "since its start", show: (row) => format.percent(row.hit_ratio) },
      { title: "Loaded", number: true, show: ({ report }) => format.size(report.counters.load_bytes ?? 0) },
      { title: "Saved", number: true, show: ({ report }) => format.size(report.counters.save_bytes ?? 0) },
      { title: "TTFT saved", number: true, show: ({ report }) => format.seconds(report.ttft_saved_s) },
      { title: "HBM fill", number: true, show: ({ report }) => arenaText(report, "hbm") },
      { title: "Host fill", number: true, show: ({ report }) => arenaText(report, "host") },
      { title: "Skipped", number: true, hint: "chunks that were not saved, although no other engine had saved them", show: (row) => format.count(row.skipped_chunks) },
      { title: "Errors", number: true, show: (row) => (row.errors ? h("span", { class: "bad-text" }, format.count(row.errors)) : "0") },
      { title: "Report", number: true, show: (row) => format.ago(row.age_s) },
    ]),
    prefixes: new Table(byId("prefixes"), "Prefixes that are loaded most", "No prefix has been loaded yet.", [
      { title: "Key", head: true, show: (row) => [copyable(row.key), row.is_pinned ? h("span", { class: "tag" }, "pinned") : ""] },
      { title: "Model", wrap: true, show: (row) => row.model || row.namespace.slice(0, 12) },
      { title: "Tokens", number: true, show: (row) => format.count(row.tokens) },
      { title: "Workers", number: true, show: (row) => format.count(row.workers) },
      { title: "Loads", number: true, show: (row, rows) => [format.count(row.hits), meter(row.hits, Math.max(...rows.map((other) => other.hits)))] },
    ]),
    latencies: new Table(byId("latencies"), "Of all engines since their start: lookups of a prompt, loads of a request, saves of a chunk from its gather to its publication", "", [
      { title: "", head: true, show: (row) => row.name },
      { title: "Count", number: true, show: (row) => format.count(row.count) },
      { title: "Median", number: true, show: (row) => format.seconds(row.p50_s) },
      { title: "95 %", number: true, show: (row) => format.seconds(row.p95_s) },
      { title: "99 %", number: true, show: (row) => format.seconds(row.p99_s) },
      { title: "Spread", number: true, hint: "1 ms to over 10 s", show: histogram },
    ]),
    namespaces: new Table(byId("namespaces"), "What lies in the root, by model and form of its KV", "Nothing is stored yet.", [
      { title: "Namespace", head: true, show: (row) => [copyable(row.id), row.is_readable ? "" : h("span", { class: "tag bad-text" }, "unreadable")] },
      { title: "Model", wrap: true, show: (row) => [row.model || row.engine, " ", h("small", null, `${row.kv}, ${row.codec}`)] },
      { title: "Sets", number: true, show: (row) => format.count(row.sets) },
      { title: "Reserved", number: true, show: (row) => [format.size(row.n_bytes), row.quota_bytes === null ? "" : h("small", null, ` of ${format.size(row.quota_bytes)}`)] },
      { title: "Uses", number: true, show: (row) => format.count(row.hits) },
    ]),
    tenants: new Table(byId("tenants"), "By the label of the tenant", "Nothing is stored yet.", [
      { title: "Tenant", head: true, show: (row) => row.label || h("small", null, "without a label") },
      { title: "Sets", number: true, show: (row) => format.count(row.sets) },
      { title: "Reserved", number: true, show: (row) => [format.size(row.n_bytes), row.quota_bytes === null ? "" : h("small", null, ` of ${format.size(row.quota_bytes)}`)] },
      { title: "Uses", number: true, show: (row) => format.count(row.hits) },
    ]),
  };
}

export function drawTables(tables, overview) {
  const { lookup, load, save } = overview.latencies;
  tables.workers.update(overview.workers);
  tables.prefixes.update(overview.top_prefixes);
  tables.latencies.update([{ name: "Lookup in the index", ...lookup }, { name: "Load", ...load }, { name: "Save (background)", ...save }]);
  tables.namespaces.update(overview.namespaces);
  tables.tenants.update(overview.tenants);
}
