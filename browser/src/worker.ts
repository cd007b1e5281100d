// The worker of a page: the device itself, so that neither a busy page nor a tab in the background holds it up.

import { BrowserStore } from "./idb";
import { Loop } from "./loop";
import type { Identity } from "./state";

export type Order = { start: string } | { leave: true };

export function work(scope: any): void {
  let loop: Loop | null = null;
  scope.onmessage = async ({ data }: MessageEvent<Order>) => {
    if ("start" in data) {
      const store = new BrowserStore(data.start), me = await store.get<Identity>("device");
      if (!me) return;
      loop = new Loop(store, me, (status, entry) => scope.postMessage({ status, entry }));
      void loop.serve();
    } else {
      await loop?.leave();
      scope.postMessage({ left: true });
    }
  };
}
