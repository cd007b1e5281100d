// The memory of a browser device that trains and validates at 8,000 rows × 64 numbers: node --expose-gc browser_memory.mjs BUILT
// Prints bytes of JavaScript's heap and of its buffers: after loading, and the most between two users.
import { createRequire } from "node:module";

const ITEMS = 8000, COLUMNS = 64, USERS = 20;
gc();
const before = process.memoryUsage();
createRequire(import.meta.url)(process.argv[2]);
let peak = 0;
const look = () => {
  const { heapUsed, arrayBuffers } = process.memoryUsage();
  peak = Math.max(peak, heapUsed - before.heapUsed + arrayBuffers - before.arrayBuffers);
};

const parts = new Map(), store = {
  get: async (part) => structuredClone(parts.get(part)),
  put: async (changed) => Object.entries(changed).forEach(([part, value]) => parts.set(part, structuredClone(value))),
};
const train = {}, heldOut = {};
for (let user = 0; user < USERS; user++) {
  train[user] = Array.from({ length: 60 }, (_, place) => (user * 131 + place * 97) % ITEMS).sort((one, other) => one - other);
  heldOut[user] = [(user * 7 + 3) % ITEMS];
}
await store.put({ device: { id: "1", capacity: "1x", level: "plain", minCohort: 100 }, data: { train, heldOut } });
gc();
look();
const loaded = peak, rows = new Uint8Array(ITEMS * (COLUMNS + 2)).map((_, place) => (place * 7919) % 254);
for (let row = 0; row < ITEMS; row++) rows[2 * row + 1] = 200;
const pairs = { kind: "quantized pairs", shape: [1000, 3], kept: [0, 3], items: ITEMS, directed: false };
const projections = {
  rows: { kind: "quantized rows", shape: [ITEMS, COLUMNS + 2], kept: [ITEMS, COLUMNS + 2], bits: 8 }, pairs,
  popularity: { kind: "quantized rows", shape: [8, 2], kept: [8, 2], bits: 8 },
};
const settings = {
  algorithm: { kind: "co_occurrence", max_items: ITEMS, pair_weight: 0.8, history_exponent: 1 }, privacy: { level: "plain" },
  subspace: { reference_factors: COLUMNS }, run: { top: 20 },
};
const facts = {
  version: 10, round: 1, items: ITEMS, run: "1", update_id: "2", acknowledged_id: "0", numbering: "0", scales: [1], evaluate: true,
  settings: JSON.stringify(settings), projections: JSON.stringify(projections), context: JSON.stringify({ sum: { kept: [(ITEMS * (ITEMS + 1)) / 2] } }),
};
const started = performance.now(), device = new fairfold.Device(store, async () => look());
const coded = { rows, pairs: new Uint8Array(0), popularity: new Uint8Array(16) };
const { shown } = await device.reply("train", { facts, arrays: { request: Float32Array.of(0.9, 0, 1, 100) }, coded });
look();
console.log(JSON.stringify({ loaded, peak, seconds: (performance.now() - started) / 1000, evaluated: shown.evaluated }));
