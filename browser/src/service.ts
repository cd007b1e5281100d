// The service worker: keeps the page, so that it opens and recommends without a network.

const CACHE = "fairfold", PAGE = ["/", "/device.js"], SECONDS = 5;

export function service(scope: any): void {
  scope.addEventListener("install", (event: any) =>
    event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(PAGE)).then(() => scope.skipWaiting())));
  scope.addEventListener("activate", (event: any) => event.waitUntil(scope.clients.claim()));
  scope.addEventListener("fetch", (event: any) => {
    const { request } = event, { origin, pathname } = new URL(request.url);
    if (request.method === "GET" && origin === location.origin && PAGE.includes(pathname)) event.respondWith(page(pathname));
  });
}

// The server's own page where it can be reached in time, else the kept one.
async function page(path: string): Promise<Response> {
  const cache = await caches.open(CACHE);
  try {
    const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(1000 * SECONDS) });
    if (response.ok) await cache.put(path, response.clone());
    if (response.ok) return response;
  } catch {} // the kept one
  return (await cache.match(path)) ?? Response.error();
}
