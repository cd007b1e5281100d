// Content-addressed objects of messages: configurations, and vectors in .npy that are cut into chunks.

import { bytesOf, hex, invalid, join, sha256, text, utf8, type Bytes } from "./bytes";
import { bytesField, packConfig, parseConfig, type Facts } from "./protobuf";

const CHUNK_BYTES = 5 * 1024 * 1024;
const MAX_HEADER_BYTES = 4096;

export type Vector = Float32Array | Float64Array | Int32Array | BigInt64Array | Uint8Array | Uint16Array;
export type Vectors = Record<string, Vector>;
export type Objects = Map<string, Bytes>;
export interface Records {
  facts: Facts;
  arrays: Vectors;
  coded: Vectors;
  secure?: Vectors;
}
export interface Tree {
  id: string;
  children: Tree[];
}

type Kind = { new (buffer: ArrayBuffer): Vector; BYTES_PER_ELEMENT: number };
const TYPES: [string, string, Kind][] = [
  ["float32", "<f4", Float32Array], ["float64", "<f8", Float64Array], ["int32", "<i4", Int32Array],
  ["int64", "<i8", BigInt64Array], ["uint8", "|u1", Uint8Array], ["float16", "<f2", Uint16Array],
];

export const packTree = (tree: Tree): Bytes =>
  join(bytesField(1, utf8(tree.id)), ...tree.children.map((child) => bytesField(2, packTree(child))));

export async function addObject(kind: string, children: Tree[], body: Bytes, objects: Objects): Promise<Tree> {
  const unique = [...new Map(children.map((child) => [child.id, child])).values()];
  const content = join(utf8(`${kind} ${unique.map((child) => child.id).join(",")} ${body.length}\0`), body);
  const id = hex(await sha256(content));
  objects.set(id, content);
  return { id, children: unique };
}

export function splitObject(content: Bytes | undefined): { kind: string; children: string[]; body: Bytes } {
  const end = content?.indexOf(0) ?? -1;
  const [kind, children, length] = content && end > 0 ? text(content.subarray(0, end)).split(" ") : [];
  const body = content?.subarray(end + 1);
  if (!body || kind === undefined || children === undefined || Number(length) !== body.length)
    throw invalid("an object of another length than it says");
  return { kind, children: children ? children.split(",") : [], body };
}

// JSON as Python writes it: with spaces, in ASCII; the facts here are texts, whole numbers, lists and tables.
export function pythonJson(value: unknown, sorted = false): string {
  if (Array.isArray(value)) return `[${value.map((one) => pythonJson(one, sorted)).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    const entries = Object.entries(value);
    if (sorted) entries.sort(([one], [other]) => (one < other ? -1 : 1));
    return `{${entries.map(([key, one]) => `${pythonJson(key)}: ${pythonJson(one, sorted)}`).join(", ")}}`;
  }
  return JSON.stringify(value).replace(/[\x7f-\uffff]/g, (letter) => "\\u" + letter.charCodeAt(0).toString(16).padStart(4, "0"));
}

export function parseJson(content: Bytes | string): any {
  try {
    const found = JSON.parse(typeof content === "string" ? content : text(content));
    if (found !== null && typeof found === "object") return found;
  } catch {} // refused below
  throw invalid("what is no JSON object");
}

// -- vectors ---------------------------------------------------------------------------------------------------------

function packVector(vector: Vector): { data: Bytes; dtype: string } {
  const [dtype, code] = TYPES.find(([, , kind]) => vector instanceof kind)!;
  let head = `{'descr': '${code}', 'fortran_order': False, 'shape': (${vector.length},), }`;
  head += " ".repeat((64 - ((head.length + 11) % 64)) % 64) + "\n";
  const magic = Uint8Array.of(0x93, 78, 85, 77, 80, 89, 1, 0, head.length & 255, head.length >> 8);
  return { data: join(magic, utf8(head), bytesOf(vector)), dtype };
}

const MAGIC = [0x93, 78, 85, 77, 80, 89, 1, 0];
const HEADER = /^\{'descr': '(.{3})', 'fortran_order': False, 'shape': \((\d{1,15}),\), \} *\n$/;

export function parseVector(data: Bytes, dtype: string, size: number): Vector {
  const start = 10 + data[8]! + 256 * data[9]!;
  const type = TYPES.find(([name]) => name === dtype);
  if (!type) throw invalid(`an array of type ${String(dtype).slice(0, 20)}`);
  const head = MAGIC.every((byte, place) => data[place] === byte) && start <= MAX_HEADER_BYTES
    ? HEADER.exec(String.fromCharCode(...data.subarray(10, start))) : null;
  if (!head || head[1] !== type[1] || Number(head[2]) !== size)
    throw invalid("not an array as numpy writes it");
  if (data.length - start !== size * type[2].BYTES_PER_ELEMENT) throw invalid("wrong size");
  const numbers = new type[2](data.slice(start).buffer);
  return numbers instanceof Uint16Array ? Float32Array.from(numbers, single) : numbers;
}

// A half float, given as its bits.
function single(half: number): number {
  const sign = half >> 15 ? -1 : 1, exponent = (half >> 10) & 31, fraction = (half & 1023) / 1024;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
}

// -- records ---------------------------------------------------------------------------------------------------------

export type Reply = [string, Vectors | Facts][];

export async function packRecords(records: Reply, objects: Objects): Promise<Tree> {
  const trees: Tree[] = [], names: Record<string, string> = {};
  for (const [name, record] of records) {
    const values = Object.values(record);
    const isArrays = !values.length || (ArrayBuffer.isView(values[0]));
    const tree = isArrays ? await packArrays(record as Vectors, objects)
      : await addObject("ConfigRecord", [], packConfig(record as Facts), objects);
    names[name] = tree.id;
    trees.push(tree);
  }
  return addObject("RecordDict", trees, utf8(pythonJson(names)), objects);
}

async function packArrays(arrays: Vectors, objects: Objects): Promise<Tree> {
  const trees: Tree[] = [], names: Record<string, string> = {};
  for (const [name, vector] of Object.entries(arrays)) {
    const { data, dtype } = packVector(vector), chunks: Tree[] = [];
    for (let start = 0; start < data.length; start += CHUNK_BYTES)
      chunks.push(await addObject("ArrayChunk", [], data.subarray(start, start + CHUNK_BYTES), objects));
    const order = [...new Set(chunks.map((chunk) => chunk.id))];
    const facts = {
      dtype, shape: [vector.length], stype: "numpy.ndarray", arraychunk_ids: chunks.map((chunk) => order.indexOf(chunk.id)),
    };
    const tree = await addObject("Array", chunks, utf8(pythonJson(facts)), objects);
    names[name] = tree.id;
    trees.push(tree);
  }
  return addObject("ArrayRecord", trees, utf8(pythonJson(names)), objects);
}

// The records of a message; objects are forgotten as they are read, so that a large model is not held twice.
export function parseRecords(recordDict: string, objects: Objects): Records {
  const found: Records = { facts: Object.create(null), arrays: {}, coded: {} };
  for (const [name, id] of Object.entries(parseJson(splitObject(objects.get(recordDict)).body))) {
    const { kind, body } = splitObject(objects.get(String(id)));
    if (kind === "ConfigRecord" && name === "fairfold") found.facts = parseConfig(body);
    else if (kind === "ArrayRecord" && (name === "arrays" || name === "coded" || name === "secure"))
      found[name] = Object.fromEntries(Object.entries(parseJson(body)).map(([key, one]) => [key, parseArray(String(one), objects)]));
  }
  return found;
}

function parseArray(id: string, objects: Objects): Vector {
  const { children, body } = splitObject(objects.get(id));
  const { dtype, shape, stype, arraychunk_ids: places } = parseJson(body);
  if (stype !== "numpy.ndarray" || !Array.isArray(shape) || shape.length !== 1 || !Array.isArray(places))
    throw invalid("wrong type");
  const data = join(...places.map((place) => splitObject(objects.get(children[place]!)).body));
  return parseVector(data, dtype, shape[0]);
}
