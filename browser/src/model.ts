// Scores of items by a packed co-occurrence model: fairfold.device.model, line by line.

import { invalid } from "./bytes";

export interface Held {
  kind: string;
  shape: [number, number];
  kept: [number, number];
  bits: number;
  items: number;
  directed: boolean;
}
export type Projections = Record<string, Held>;
export const ROWS = "rows", PAIRS = "pairs", NEIGHBORS = "neighbors", POPULARITY = "popularity";
const STEP = 16, ZERO = 208, FACTORS = 2, SMALLEST = 1e-30, MAX_ITEMS = 1 << 24;
const factor = (code: number): number => (code ? Math.fround(Math.exp((code - ZERO) / STEP)) : 0);

// Bytes of a packed tensor by its description; refuses descriptions that define none.
export function packedBytes(held: Held): number {
  const [count, columns] = held.kept, [rows, shapeColumns] = held.shape;
  if (![count, columns, rows, shapeColumns].every(Number.isSafeInteger) || count < 0 || count > rows || columns < 0 || columns > shapeColumns)
    throw invalid("a cut tensor that is larger than its whole");
  if (held.kind === "quantized rows") {
    if (!Number.isInteger(held.bits) || held.bits < 2 || held.bits > 8 || columns < FACTORS)
      throw invalid("rows of other bits than 2 to 8");
    return count * (FACTORS + Math.ceil(((columns - FACTORS) * held.bits) / 8));
  }
  const { items, directed } = held;
  if (held.kind !== "quantized pairs" || typeof directed !== "boolean" || columns !== 3 || !Number.isInteger(items) || items < 1 || items > MAX_ITEMS)
    throw invalid("a tensor of unknown kind");
  return count && pairPlaces(held).end;
}

// Of a list of pairs: the low bits of a position, and where low bits, bitmap and end are.
function pairPlaces({ kept: [count], items, directed }: Held): { low: number; lows: number; bitmap: number; end: number } {
  const positions = directed ? items * items : (items * (items + 1)) / 2;
  let low = 0;
  while (count && count * 2 ** (low + 1) <= positions) low++;
  const lows = 64 + Math.ceil(count / 2), bitmap = lows + Math.ceil((count * low) / 8);
  return { low, lows, bitmap, end: bitmap + Math.ceil((count + Math.floor((positions - 1) / 2 ** low)) / 8) };
}

interface Rows {
  into: Float64Array;
  out: Float64Array;
  columns: number;
  values: Int8Array; // row by row
}

function parseRows(content: Uint8Array, held: Held): Rows {
  const count = held.kept[0], columns = held.kept[1] - FACTORS, { bits } = held;
  const width = Math.ceil((columns * bits) / 8), most = 2 ** (bits - 1) - 1, mask = 2 ** bits - 1;
  const into = new Float64Array(count), out = new Float64Array(count), values = new Int8Array(count * columns);
  for (let row = 0; row < count; row++) {
    into[row] = factor(content[FACTORS * row]!);
    out[row] = factor(content[FACTORS * row + 1]!);
    const start = FACTORS * count + row * width;
    for (let column = 0; column < columns; column++) {
      const bit = column * bits, at = start + (bit >> 3);
      const value = (((content[at]! | ((content[at + 1] ?? 0) << 8)) >> (bit & 7)) & mask) - most;
      if (value > 127) throw invalid("a number that no row has");
      values[row * columns + column] = value;
    }
  }
  return { into, out, columns, values };
}

// A list of pairs: a rarer item, another one, and a value; those of an item with itself are left out.
function parsePairs(content: Uint8Array, held: Held): { first: Int32Array; second: Int32Array; value: Float32Array } {
  const count = held.kept[0], { items, directed } = held, { low, lows, bitmap, end } = pairPlaces(held);
  const first = new Int32Array(count), second = new Int32Array(count), value = new Float32Array(count);
  const view = new DataView(content.buffer, content.byteOffset), bit = (at: number): number => (content[at >> 3]! >> (at & 7)) & 1;
  const damaged = (): Error => invalid("a damaged list of pairs");
  let kept = 0, place = 0;
  for (let at = 8 * bitmap; count && at < 8 * end; at++) {
    if (!bit(at)) continue;
    let position = (at - 8 * bitmap - place) * 2 ** low;
    for (let b = 0; b < low; b++) position += bit(8 * lows + low * place + b) * 2 ** b;
    const rarer = Math.floor(directed ? position / items : (Math.sqrt(8 * position + 1) - 1) / 2);
    const other = position - rarer * (directed ? items : (rarer + 1) / 2);
    const level = view.getFloat32(4 * ((content[64 + (place >> 1)]! >> (4 * (place & 1))) & 15), true);
    if (++place > count || rarer >= items || !Number.isFinite(level)) throw damaged();
    if (rarer === other) continue;
    first[kept] = rarer;
    second[kept] = other;
    value[kept++] = level;
  }
  if (place < count) throw damaged();
  return { first: first.subarray(0, kept), second: second.subarray(0, kept), value: value.subarray(0, kept) };
}

export class DeviceModel {
  readonly reach: number;
  private readonly known: number;
  private readonly rows: Rows;
  private readonly from: Int32Array; // what an item of a history adds to the score of another, beyond the rows
  private readonly to: Int32Array;
  private readonly link: Float64Array;
  private readonly largestNorm: number = 0;
  private readonly largestLink: number = 0;
  private readonly logPopularity: number[] = [];
  private added = new Float64Array(0);
  private found = new Float32Array(0);

  constructor(tensors: Record<string, Uint8Array>, projections: Projections, pairWeight: number) {
    this.rows = compact(parseRows(tensors[ROWS]!, projections[ROWS]!));
    const { into: a, out: b } = this.rows;
    this.known = b.length;
    const pairs = parsePairs(tensors[PAIRS]!, projections[PAIRS]!), many = pairs.first.length;
    const near = projections[NEIGHBORS] ? parsePairs(tensors[NEIGHBORS]!, projections[NEIGHBORS]) : null;
    const size = 2 * many + (near?.first.length ?? 0);
    this.from = new Int32Array(size);
    this.to = new Int32Array(size);
    this.link = new Float64Array(size);
    for (let at = 0; at < many; at++) {
      const rarer = pairs.first[at]!, other = pairs.second[at]!;
      let added = pairs.value[at]!, back = 1;
      if (rarer < this.known && other < this.known) {
        added -= b[rarer]! * this.product(rarer, other) * a[other]!;
        back = (a[rarer]! * b[other]!) / Math.max(a[other]! * b[rarer]!, SMALLEST);
      }
      added *= pairWeight;
      this.from.set([other, rarer], 2 * at);
      this.to.set([rarer, other], 2 * at);
      this.link.set([added, added * back], 2 * at);
    }
    if (near) {
      this.from.set(near.second, 2 * many);
      this.to.set(near.first, 2 * many);
      this.link.set(near.value, 2 * many);
    }
    for (let row = 0; row < this.known; row++)
      this.largestNorm = Math.max(this.largestNorm, Math.sqrt(this.product(row, row)) * b[row]!);
    this.reach = this.known;
    for (let at = 0; at < size; at++) {
      this.largestLink = Math.max(this.largestLink, Math.abs(this.link[at]!));
      this.reach = Math.max(this.reach, this.from[at]! + 1, this.to[at]! + 1);
    }
    if (projections[POPULARITY]) {
      const { into, out } = parseRows(tensors[POPULARITY]!, projections[POPULARITY]);
      const curve = [...into].flatMap((value, place) => [value, out[place]!]);
      if (curve.some(Boolean)) this.logPopularity = curve.map((value) => Math.log(Math.max(value, SMALLEST)));
    }
  }

  private product(one: number, other: number): number {
    const { columns, values } = this.rows;
    let sum = 0;
    for (let c = 0; c < columns; c++) sum += values[one * columns + c]! * values[other * columns + c]!;
    return sum;
  }

  // What popularity adds to the score of an item for a user without a history.
  private popularity(item: number): number {
    const curve = this.logPopularity, place = Math.min(Math.log2(item + 1), curve.length - 1);
    const first = Math.min(Math.floor(place), curve.length - 2);
    return Math.exp(curve[first]! + (curve[first + 1]! - curve[first]!) * (place - first));
  }

  // Scores of the first `count` items in single precision; those without one come last, in their order.
  scores(history: ArrayLike<number>, count: number): Float32Array {
    const { columns, values, into, out } = this.rows;
    const has = new Uint8Array(this.reach), taste = new Float64Array(columns);
    let held = 0, known = 0;
    for (let place = 0; place < history.length; place++) {
      const item = history[place]!;
      if (item >= this.reach || has[item]) continue;
      has[item] = 1;
      held++;
      if (item < this.known) {
        known++;
        for (let c = 0; c < columns; c++) taste[c]! += into[item]! * values[item * columns + c]!;
      }
    }
    const norm = Math.sqrt(taste.reduce((sum, value) => sum + value * value, 0));
    const least = this.known ? -(norm * this.largestNorm + held * this.largestLink) : 0;
    const size = Math.max(count, this.reach);
    if (this.added.length < size) [this.added, this.found] = [new Float64Array(size), new Float32Array(size)];
    const added = this.added.fill(0), found = this.found.subarray(0, count); // the same memory for every user
    for (let at = 0; at < this.link.length; at++) if (has[this.from[at]!]) added[this.to[at]!]! += this.link[at]!;
    for (let item = 0; item < count; item++) {
      let score = added[item]!;
      if (item < this.known) {
        let sum = 0;
        for (let c = 0; c < columns; c++) sum += values[item * columns + c]! * taste[c]!;
        score += sum * out[item]!;
      } else if (!score) {
        found[item] = least - (1 - 1 / (item + 2)) * (1 + Math.abs(least));
        continue;
      }
      found[item] = score + (this.logPopularity.length ? this.popularity(item) / (1 + known) : 0);
    }
    return found;
  }

  // The best of the first `count` items outside a history; of equal scores the lower number comes first.
  best(history: ArrayLike<number>, count: number, top: number): [number, number][] {
    const scores = this.scores(history, count), best: number[] = [];
    for (let place = 0; place < history.length; place++) if (history[place]! < count) scores[history[place]!] = -Infinity;
    for (let item = 0; item < count; item++) {
      const score = scores[item]!;
      if (score === -Infinity || (best.length === top && score <= scores[best[top - 1]!]!)) continue;
      let at = best.length;
      while (at && scores[best[at - 1]!]! < score) at--;
      best.splice(at, 0, item);
      best.length = Math.min(best.length, top);
    }
    return best.map((item) => [item, scores[item]!]);
  }

  // NDCG@top of the wanted items, ranked by a history; `longest` is the longest history that is ranked.
  ndcg(history: ArrayLike<number>, wanted: number[], catalogue: number, top: number, longest: number): number {
    const relevant = new Set(wanted), discount = (place: number): number => 1 / Math.log2(place + 2);
    let gain = 0, ideal = 0;
    this.best(history, Math.min(catalogue, this.reach + top + longest), top).forEach(([item], place) => {
      if (relevant.has(item)) gain += discount(place);
    });
    for (let place = 0; place < Math.min(wanted.length, top); place++) ideal += discount(place);
    return Math.min(gain / ideal, 1);
  }
}

// Only rows with a factor: the others stand for no item.
function compact(rows: Rows): Rows {
  const valid = [...rows.out.keys()].filter((row) => rows.out[row]! > 0), { columns } = rows;
  if (valid.length === rows.out.length) return rows;
  const values = new Int8Array(valid.length * columns);
  valid.forEach((row, place) => values.set(rows.values.subarray(row * columns, (row + 1) * columns), place * columns));
  return {
    into: Float64Array.from(valid, (row) => rows.into[row]!), out: Float64Array.from(valid, (row) => rows.out[row]!),
    columns, values,
  };
}
