// The page: consent, a person's own rows, joining, rounds, recommendations, leaving.

import { hex, sha256, utf8 } from "./bytes";
import { histories, numbered, parseCsv, readFile, readRows, type Row } from "./csv";
import { BrowserStore } from "./idb";
import { describe, enrol, fetchText, makeKeys, parseToken, Refused, type Fleet, type Keys } from "./link";
import type { LogEntry, Status } from "./loop";
import type { Data, Identity, StoredModel } from "./state";
import style from "./style.css";
import { recommend } from "./tasks";
import type { Order } from "./worker";

const HELD_OUT = 0.1, TOP = 10, SHOWN = 12, MIN_COHORT = 100, TAB = "device"; // TAB: which device a reloaded tab is
const CAPACITIES: [string, string][] = [["1x", "the whole model (1x)"], ["4x", "a quarter of it (4x)"], ["16x", "a sixteenth, for small devices (16x)"]];
const KINDS: Record<string, string> = { train: "training", evaluate: "measuring", "query.model": "the model arrives" };
const PRIVACY: Record<string, string> = {
  "": `secure from ${MIN_COHORT} devices on, plain with fewer.`, plain: "plain runs.", secure: "secure runs.",
  private: "runs with noise, in which a browser cannot take part yet.",
};
const NONE: Record<string, string> = {};

interface Invitation {
  token: string;
  name: string; // of the device that it makes
  capacity: string;
  place: number; // among the invitations of a link
}

// -- pieces of the page ----------------------------------------------------------------------------------------------

type Child = Node | string;
function element<K extends keyof HTMLElementTagNameMap>(tag: K, attributes: Record<string, string> = NONE, ...children: Child[]): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const list = (lines: Child[], attributes = NONE): HTMLElement => element("ul", attributes, ...lines.map((line) => element("li", NONE, line)));
const section = (title: string, ...children: Child[]): HTMLElement => element("section", NONE, element("h2", NONE, title), ...children);
const button = (words: string, look: string, act: () => void): HTMLButtonElement => {
  const made = element("button", { type: "button", class: look }, words);
  made.onclick = act;
  return made;
};
const wordsOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));
const bytes = (size: number): string => (size < 1e3 ? `${size} B` : size < 1e6 ? `${(size / 1e3).toFixed(1)} kB` : `${(size / 1e6).toFixed(1)} MB`);

// -- which device this tab is ----------------------------------------------------------------------------------------

// The invitations of a link, #TOKEN or #TOKEN:CAPACITY, with commas between them.
async function invitations(): Promise<Invitation[]> {
  const words = decodeURIComponent(location.hash.slice(1)).split(",").filter(Boolean);
  return Promise.all(words.map(async (word, place) => {
    const [token = "", capacity = ""] = word.split(":");
    return { token, capacity, place, name: hex((await sha256(utf8(token))).subarray(0, 8)) };
  }));
}

// Hold a device's lock while this tab lives; false where another tab is this device.
function hold(name: string, waits = false): Promise<boolean> {
  return new Promise((resolve) => {
    void navigator.locks.request(`fairfold ${name}`, { ifAvailable: !waits }, (lock) => {
      resolve(lock !== null);
      return lock && new Promise(() => {});
    });
  });
}

export async function show(): Promise<void> {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(style);
  document.adoptedStyleSheets = [sheet];
  addEventListener("hashchange", () => location.reload()); // another invitation in the same tab
  if (!globalThis.crypto?.subtle || !globalThis.indexedDB || !navigator.locks)
    return say("This browser cannot be a device here.", "It needs a connection that is secure (https, or http://localhost), and a browser of 2025 or later.");
  try {
    navigator.serviceWorker?.register("/device.js").catch(() => {}); // without one the page needs a network
    const given = await invitations(), known = await BrowserStore.names();
    const mine = given.length ? given.map(({ name }) => name).filter((name) => known.includes(name)) : known;
    const last = sessionStorage.getItem(TAB), order = [...new Set([...(last && known.includes(last) ? [last] : []), ...mine])];
    for (const name of order) if (await hold(name)) return await member(new BrowserStore(name));
    for (const invitation of given)
      if (!known.includes(invitation.name) && (await hold(invitation.name))) return await consent(invitation, given.length);
    if (!order.length && !given.length)
      return say("No invitation", "A fleet's operator gives you a link with an invitation in it. Open that link as a whole.");
    say("This device is open in another tab", "Two tabs of one device would answer twice. This one goes on by itself when the other is closed.");
    const next = order[0] ?? given[0]!.name;
    if (await hold(next, true)) location.reload();
  } catch (error) {
    say("This page cannot go on", wordsOf(error));
  }
}

let hasActed = false; // a person has joined or left: what comes then is a new page to a screen reader

function turn(title: string, ...children: Child[]): void {
  document.title = title;
  const head = element("h1", { tabindex: "-1" }, title);
  document.querySelector("main")!.replaceChildren(head, ...children);
  if (hasActed) head.focus();
}

const say = (title: string, words: string): void => turn(title, element("p", { role: "status" }, words));

// -- consent and joining ---------------------------------------------------------------------------------------------

let offered: ((rows: Row[], from: string) => void) | null = null;
let waiting: [unknown, string] | null = null;

// A site's own script hands over rows: from the same origin by this function, from another by a message to this window.
export function offer(rows: unknown, from: string = location.origin): void {
  if (!offered) waiting = [rows, from];
  else offered(readRows(rows), from);
}

function listen(): void {
  addEventListener("message", (event) => {
    if (event.data?.fairfold !== "rows" || event.source !== opener) return;
    try {
      offer(event.data.rows, event.origin);
    } catch {} // what is no rows is ignored
  });
  opener?.postMessage({ fairfold: "ready" }, "*");
}

async function consent(invitation: Invitation, many: number): Promise<void> {
  let fleet: Fleet;
  try {
    await parseToken(invitation.token);
    fleet = await describe();
  } catch (error) {
    return say("This invitation cannot be used now", `${wordsOf(error)} ${error instanceof Refused ? "Reload this page to try again." : ""}`);
  }
  const operator = fleet.operator || location.host, catalogue = fleet.catalogue ? (await fetchText("catalogue")).split("\n").slice(0, -1) : [];
  const chosen = element("div", { "aria-live": "polite" }), problem = element("p", { class: "bad", role: "alert" });
  const file = element("input", { type: "file", id: "file", accept: ".csv,.tsv,text/csv,text/plain" });
  const capacity = element("select", { id: "capacity" }, ...CAPACITIES.map(([value, words]) => element("option", { value }, words)));
  const secure = element("input", { type: "checkbox", id: "secure" }), cohort = element("input", { type: "number", id: "cohort", min: "2", value: `${MIN_COHORT}` });
  capacity.value = CAPACITIES.some(([value]) => value === invitation.capacity) ? invitation.capacity : "4x";
  let data: Data | null = null;

  const use = async (read: () => Promise<Row[]> | Row[], from: string): Promise<void> => {
    problem.textContent = "";
    data = null;
    join.disabled = true;
    try {
      const { rows, unknown } = numbered(await read(), catalogue, fleet.items);
      if (!rows.length) throw new Error(`None of the items is in this fleet's catalogue of ${fleet.items} items, for instance not "${unknown[0]?.slice(0, 60)}".`);
      const found = await histories(rows, HELD_OUT), users = Object.keys(found.train).length, items = [...new Set(rows.map(([, , item]) => item))];
      data = found;
      chosen.replaceChildren(
        element("p", NONE, `${from}: ${rows.length} rows, ${items.length} items${users > 1 ? `, ${users} users` : ""}.`,
          unknown.length ? ` ${unknown.length} items are not in the catalogue, and are left out, such as "${unknown[0]!.slice(0, 60)}".` : ""),
        list(items.slice(0, SHOWN)), element("p", { class: "soft" }, items.length > SHOWN ? `and ${items.length - SHOWN} more. ` : "",
          "A tenth of the rows is set aside: it trains nothing, and measures how good recommendations are.",
          users > 1 ? " An invitation says how many users a device may stand for: of more, the first ones are taken." : ""));
      join.disabled = false;
    } catch (error) {
      chosen.replaceChildren();
      problem.textContent = wordsOf(error);
    }
  };
  file.onchange = () => file.files?.[0] && void use(() => readFile(file.files![0]!), file.files[0].name);
  offered = (rows, from) => void use(() => rows, `Handed over by ${from}`);
  const sample = button("Use example data", "", () => void use(async () => share(parseCsv(await fetchText("sample")), invitation.place, many), "Example data"));
  const join = button("Join", "main", () => void joining());
  join.disabled = true;

  const joining = async (): Promise<void> => {
    join.disabled = true;
    problem.textContent = "";
    try {
      const store = new BrowserStore(invitation.name);
      await navigator.storage?.persist?.();
      const keys = (await store.get<Keys>("keys")) ?? (await makeKeys());
      await store.put({ keys });
      const me: Identity = {
        ...keys, ...(await enrol(invitation.token, keys.pem)), operator, capacity: capacity.value, level: secure.checked ? "secure" : "plain",
        minCohort: Math.max(2, cohort.valueAsNumber || MIN_COHORT),
      };
      await store.put({ device: me, keys: null, data: ofFirst(data!, me.users), catalogue: catalogue.join("\n") });
      hasActed = true;
      await member(store);
    } catch (error) {
      join.disabled = false;
      problem.textContent = `${wordsOf(error)} ${error instanceof Refused && error.kind === "unreachable" ? "Press Join to try again." : ""}`;
    }
  };

  turn(`Join the fleet of ${operator}`,
    element("p", NONE, "Devices of many people train a model that recommends. This browser becomes one of them; your file stays in it."),
    section("Who runs it", element("p", NONE, fleet.operator ? `${fleet.operator} says that it runs this fleet, at ${location.host}. ` : `The server does not say who runs it. Its address is ${location.host}. `,
      "Ask the person who gave you the link."), element("p", { class: "soft" }, `Its authority: ${fleet.authority}`)),
    section("What would leave this browser", list([
      "How often each item is in your histories, once; and in rounds, sums over pairs of items that are in one history.",
      "A number: how well a model recommends what you set aside.",
      "The size that you choose below, and your network address while this page is open.",
    ]), element("p", NONE, "In a plain run the server can see from these sums which items you have. In a secure run it sees only the sum over all devices. This server: ",
      PRIVACY[fleet.privacy] ?? fleet.privacy)),
    section("What never leaves it", list(["Your file, and the names of users in it.", "The keys of this device: even this page cannot read them.", "What is recommended to you."])),
    section("Your data", element("label", { for: "file" }, "A CSV file with a column item, and perhaps a column user"), file, ...(fleet.sample ? [element("div", NONE, sample)] : []), chosen),
    section("This device", element("label", { for: "capacity" }, "How much it holds"), capacity,
      element("label", { class: "line", for: "secure" }, secure, element("span", NONE, "Only secure runs: refuse plain ones.")),
      element("label", { for: "cohort" }, "Fewest devices of a secure sum (from few, a server could work out single histories)"), cohort),
    problem, join,
    element("p", { class: "soft" }, "Joining stores this device in this browser. It works while its tab is open. You can leave at any time, and delete everything here."));
  listen();
  if (waiting) offer(...waiting);
}

// The histories of the first users: an invitation says how many a device may stand for.
function ofFirst({ train, heldOut }: Data, users: number): Data {
  const some = new Set(Object.keys(train).slice(0, users || undefined));
  const cut = (part: Data["train"]): Data["train"] => Object.fromEntries(Object.entries(part).filter(([user]) => some.has(user)));
  return { train: cut(train), heldOut: cut(heldOut) };
}

// One device's part of example data: every so-many-th user.
function share(rows: Row[], place: number, many: number): Row[] {
  const users = [...new Set(rows.map(({ user }) => user))].filter((_, number) => number % many === place);
  return rows.filter(({ user }) => users.includes(user));
}

// -- a device that has joined ----------------------------------------------------------------------------------------

async function member(store: BrowserStore): Promise<void> {
  const me = (await store.get<Identity>("device"))!, data = (await store.get<Data>("data"))!;
  sessionStorage.setItem(TAB, store.name);
  const status = element("p", { role: "status", id: "status" }, "Starting."), rounds = element("tbody"), best = element("div", { "aria-live": "polite" });
  const users = Object.keys(data.train), user = element("select", { id: "user" }, ...users.map((name) => element("option", { value: name }, name || "me")));
  const worker = new Worker("/device.js"), order = (what: Order): void => worker.postMessage(what);
  const heads = ["round", "quality", "received", "sent", "seconds"].map((name) => element("th", { scope: "col" }, name));
  user.onchange = () => void recommendations();

  const row = (entry: LogEntry): void => {
    if (!(entry.kind in KINDS) && !entry.problem) return;
    const quality = entry.evaluated ? (entry.quality! / entry.evaluated).toFixed(4) : "–";
    const name = entry.round === undefined ? KINDS[entry.kind] ?? entry.kind : `${entry.round + 1}, ${KINDS[entry.kind]}`;
    const cells = entry.problem ? [element("td", { colspan: "4", class: "bad" }, entry.problem)]
      : [quality, bytes(entry.received), bytes(entry.sent), entry.seconds.toFixed(1)].map((text) => element("td", NONE, text));
    rounds.prepend(element("tr", NONE, element("td", NONE, name), ...cells));
  };
  const recommendations = async (): Promise<void> => {
    const model = await store.get<StoredModel>("model");
    if (!model) return best.replaceChildren(element("p", NONE, "They come with the model, after the last round, and are computed here, also without a network."));
    try {
      const names = ((await store.get<string>("catalogue")) ?? "").split("\n"), own = data.train[user.value] ?? [];
      const found = await recommend(model.file, own, TOP), lines = found.map(([item]) => names[item] || `item ${item}`);
      best.replaceChildren(lines.length ? element("ol", { id: "best" }, ...lines.map((line) => element("li", NONE, line))) : element("p", NONE, "The model knows none of these items yet."),
        element("p", { class: "soft" }, `By the model after round ${model.round}, ${bytes(model.file.length)}, which came ${new Date(model.at).toLocaleString()}.`));
    } catch (error) {
      best.replaceChildren(element("p", { class: "bad" }, wordsOf(error)));
    }
  };
  worker.onmessage = ({ data: shown }: MessageEvent<{ status?: Status; entry?: LogEntry; left?: true }>) => {
    if (shown.left) return void forget();
    if (shown.status) {
      status.textContent = shown.status.message;
      status.className = shown.status.state === "working" ? "working" : shown.status.state === "refused" ? "bad" : "";
      status.dataset.state = shown.status.state;
    }
    if (shown.entry) {
      row(shown.entry);
      if (shown.entry.kind === "query.model") void recommendations();
    }
  };
  worker.onerror = (event) => {
    status.textContent = `The device has stopped: ${event.message}. Reload the page.`;
    status.className = "bad";
  };
  const forget = async (): Promise<void> => {
    hasActed = true;
    worker.terminate();
    await store.delete();
    sessionStorage.removeItem(TAB);
    if (!(await BrowserStore.names()).length) {
      await BrowserStore.clear();
      for (const registration of (await navigator.serviceWorker?.getRegistrations()) ?? []) await registration.unregister();
      await caches.delete("fairfold");
    }
    history.replaceState(null, "", "/");
    say("This browser has left the fleet", "Keys, data and model of this device are deleted here. What earlier rounds summed up stays in their models; new runs begin without you.");
  };
  const leave = button("Leave and delete everything", "danger", () => {
    if (!confirm("Leave the fleet, and delete keys, data and model of this device?")) return;
    leave.disabled = true;
    status.textContent = "Leaving.";
    order({ leave: true });
    setTimeout(() => void forget(), 5000); // a server that does not answer holds up nobody
  });
  const total = new Set(Object.values(data.train).flat()).size, size = CAPACITIES.find(([value]) => value === me.capacity)?.[1] ?? me.capacity;
  turn(`A device of ${me.operator}`,
    element("p", { class: "soft" }, `${total} items${users.length > 1 ? ` of ${users.length} users` : ""}; it holds ${size}; ${me.level === "secure" ? "secure sums only" : "plain or secure runs"}. Leave this tab open, it may be in the background.`),
    element("div", { class: "panel" }, status),
    section("Recommendations", ...(users.length > 1 ? [element("label", { for: "user" }, "For"), user] : []), best),
    section("Rounds", element("p", { class: "soft" }, "The last round comes first. Quality: NDCG of the rows that are set aside, 1 at best."),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rounds" },
        element("table", NONE, element("thead", NONE, element("tr", NONE, ...heads)), rounds))),
    section("Leave", element("p", NONE, "The server learns it, and this browser forgets everything of this device."), leave));
  for (const entry of (await store.get<LogEntry[]>("log")) ?? []) row(entry);
  await recommendations();
  order({ start: store.name });
}
