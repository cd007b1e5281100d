// A person's own rows: a CSV file, or rows that a site's script hands over. fairfold.flower.local_data in the browser.

import { Refusal, sha256, utf8 } from "./bytes";
import type { Data, Histories } from "./state";

const MAX_BYTES = 64 << 20;
export interface Row {
  user: string;
  item: string;
}

const invalidData = (given: string, needed: string, remedy = "Choose another file."): Refusal =>
  new Refusal("InvalidData", given, needed, remedy);

export async function readFile(file: File): Promise<Row[]> {
  if (file.size > MAX_BYTES) throw invalidData(`a file of ${(file.size / 1e6).toFixed(0)} MB`, "at most 67 MB");
  let content: string;
  try {
    content = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw invalidData("a file that is no text in UTF-8", "a CSV file, with the column item");
  }
  return parseCsv(content);
}

export function parseCsv(content: string): Row[] {
  const first = content.slice(0, content.search(/[\r\n]|$/)), count = (letter: string) => first.split(letter).length;
  const separator = [",", ";", "\t"].reduce((best, one) => (count(one) > count(best) ? one : best));
  const lines = cells(content, separator), head = lines.next().value ?? [];
  const item = head.indexOf("item"), user = head.indexOf("user"), rows: Row[] = [];
  if (content.includes("\0") || item < 0)
    throw invalidData(`a file with the columns ${head.slice(0, 5).join(", ").slice(0, 80).replace(/[^ -~\u00a0-\uffff]/g, "?") || "none"}`, "a CSV file with a column item");
  for (const line of lines) {
    const found = { user: (user < 0 ? "" : line[user] ?? "").trim(), item: (line[item] ?? "").trim() };
    if (!found.item) throw invalidData(`a row without an item (number ${rows.length + 1})`, "an item in every row", "Correct the file.");
    rows.push(found);
  }
  if (!rows.length) throw invalidData("a file without rows", "at least one item");
  return rows;
}

// The cells of each line that is not empty; a cell in quotes may hold separators and line breaks.
function* cells(content: string, separator: string): Generator<string[]> {
  const cell = new RegExp(`(?:"((?:[^"]|"")*)"|((?!")[^${separator}\\r\\n]*))(${separator}|\\r\\n|[\\r\\n]|$)`, "y");
  let line: string[] = [];
  while (cell.lastIndex < content.length) {
    const found = cell.exec(content);
    if (!found) throw invalidData("a file with a quote that is not closed", "a CSV file", "Correct the file.");
    line.push(found[1] === undefined ? found[2]! : found[1].replace(/""/g, '"'));
    if (found[3] === separator && cell.lastIndex < content.length) continue;
    if (line.length > 1 || line[0]) yield line;
    line = [];
  }
}

// Rows that a site hands over: names of items, or objects with an item and perhaps a user.
export function readRows(given: unknown): Row[] {
  const rows = Array.isArray(given) ? given : [];
  const found = rows.map((row): Row => (typeof row === "object" && row !== null ? { user: String(row.user ?? "").trim(), item: String(row.item ?? "").trim() }
    : { user: "", item: String(row).trim() }));
  if (!found.length || found.some((row) => !row.item)) throw invalidData("no rows from the site", "a list of items", "Choose a file instead.");
  return found;
}

// The numbers of the items; the catalogue is a list of names, or empty where items are called by their numbers.
export function numbered(rows: Row[], catalogue: string[], items: number): { rows: [string, number, string][]; unknown: string[] } {
  const numbers = new Map(catalogue.map((name, number) => [name.trim(), number])), unknown = new Set<string>();
  const found: [string, number, string][] = [];
  for (const { user, item } of rows) {
    const number = catalogue.length ? numbers.get(item) : /^\d{1,15}$/.test(item) ? Number(item) : undefined;
    if (number === undefined || number >= items) unknown.add(item);
    else found.push([user, number, item]);
  }
  return { rows: found, unknown: [...unknown] };
}

// Histories to train on; a share of the rows, by the hash of user and item, is held out to measure quality.
export async function histories(rows: [string, number, string][], share: number): Promise<Data> {
  const train: Record<string, Set<number>> = Object.create(null), heldOut: Record<string, Set<number>> = Object.create(null);
  for (const [user, number, item] of rows) {
    const part = share && (await uniform(user, item)) < share ? heldOut : train;
    (part[user] ??= new Set()).add(number);
  }
  const sorted = (part: Record<string, Set<number>>): Histories =>
    Object.fromEntries(Object.keys(part).filter((user) => user in train).sort().map((user) => [user, [...part[user]!].sort((a, b) => a - b)]));
  if (!Object.keys(train).length) throw invalidData("a file of too few rows", "more rows: some are held out to measure quality");
  return { train: sorted(train), heldOut: sorted(heldOut) };
}

export async function uniform(user: string, item: string): Promise<number> {
  const hash = await sha256(utf8(`${user}\0${item}`));
  return Number(new DataView(hash.buffer).getBigUint64(0)) / 2 ** 64;
}
