// Parts of devices in IndexedDB; keys in it cannot be exported.

import { Refusal } from "./bytes";
import type { Store } from "./state";

const DATABASE = "fairfold", PARTS = "parts";

function done<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(stored(request.error));
  });
}

// What a person can do about a browser that stores nothing.
function stored(error: DOMException | null): Error {
  const isFull = error?.name === "QuotaExceededError";
  return new Refusal(isFull ? "QuotaExceeded" : "InvalidState", isFull ? "a disk that is full" : `storage of this browser that fails (${error?.message ?? "unknown"})`,
    "room for this device's state", isFull ? "Free some space; nothing was lost, and nothing was sent." : "Leave private browsing, or use another browser.");
}

async function parts(mode: IDBTransactionMode): Promise<{ objects: IDBObjectStore; ended: Promise<void> }> {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(PARTS);
  const database = await done(request), transaction = database.transaction(PARTS, mode, { durability: "strict" });
  const ended = new Promise<void>((resolve, reject) => {
    transaction.oncomplete = () => (database.close(), resolve());
    transaction.onabort = () => (database.close(), reject(stored(transaction.error)));
  });
  ended.catch(() => {}); // it is awaited where something was written
  return { objects: transaction.objectStore(PARTS), ended };
}

export class BrowserStore implements Store {
  constructor(readonly name: string) {}

  async get<T>(part: string): Promise<T | undefined> {
    return done((await parts("readonly")).objects.get([this.name, part]));
  }

  async put(changed: Record<string, unknown>): Promise<void> {
    const { objects, ended } = await parts("readwrite");
    for (const [part, value] of Object.entries(changed))
      if (value === null) objects.delete([this.name, part]);
      else objects.put(value, [this.name, part]);
    await ended;
  }

  async delete(): Promise<void> {
    const { objects, ended } = await parts("readwrite");
    objects.delete(IDBKeyRange.bound([this.name], [this.name, []]));
    await ended;
  }

  // All devices, and what is left of joining that was not finished.
  static async clear(): Promise<void> {
    const { objects, ended } = await parts("readwrite");
    objects.clear();
    await ended;
  }

  // The devices of this browser.
  static async names(): Promise<string[]> {
    const keys = (await done((await parts("readonly")).objects.getAllKeys())) as [string, string][];
    return keys.filter(([, part]) => part === "device").map(([name]) => name);
  }
}
