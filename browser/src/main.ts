// One file in three places: a page, its worker, and its service worker.

import { offer, show } from "./page";
import { service } from "./service";
import { work } from "./worker";

const here: any = globalThis;
if ("ServiceWorkerGlobalScope" in here) service(here);
else if ("DedicatedWorkerGlobalScope" in here) work(here);
else {
  here.fairfold = { offer }; // for a site's own script
  void show();
}
