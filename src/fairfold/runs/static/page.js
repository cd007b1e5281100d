"use strict";
// Asks for /status.json every two seconds and draws it. Whatever comes from a run is set as text, never as HTML.

const token = new URLSearchParams(location.search).get("token");
const headers = token ? {Authorization: `Bearer ${token}`} : {};
const at = (id) => document.getElementById(id);
const PAUSE = 2000;

function make(tag, text, className) {
  const found = document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  if (className) found.className = className;
  return found;
}

function svg(tag, attributes, text) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  return found;
}

function bytes(count) {
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (count >= unit) return `${(count / unit).toPrecision(3)} ${name}`;
  return `${count} B`;
}

function seconds(count) {
  if (count < 1) return `${Math.round(1000 * count)} ms`;
  if (count < 60) return `${count.toPrecision(2)} s`;
  if (count < 3600) return `${Math.floor(count / 60)} min ${Math.round(count % 60)} s`;
  return `${Math.floor(count / 3600)} h ${Math.round((count % 3600) / 60)} min`;
}

function figures(status) {
  const evaluated = status.rounds.filter((row) => row.quality !== null);
  const last = evaluated.length ? evaluated[evaluated.length - 1].quality.toFixed(4) : "–";
  const left = Math.max(status.num_rounds - status.done, 0) * status.seconds;
  const shown = [
    [`${status.done} of ${status.num_rounds}`, "rounds"], [last, status.metric],
    [status.nodes.known || (status.rounds.length ? status.rounds[status.rounds.length - 1].clients : 0), status.nodes.known ? "nodes known" : "clients per round"],
    [bytes(status.bytes.bytes_down), "sent to devices"], [bytes(status.bytes.bytes_up), "came from devices"],
    [status.rounds.length ? seconds(status.seconds) : "–", "per round"],
  ];
  if (status.state !== "finished") shown.push([left ? seconds(left) : "–", "time left"]);
  if (status.failed_rounds) shown.push([status.failed_rounds, "rounds did not count"]);
  if (status.nodes.with_model) shown.push([status.nodes.with_model, "nodes store the model"]);
  for (const [name, value] of Object.entries(status.privacy || {}))
    if (typeof value === "number") shown.push([value.toPrecision(3), `privacy: ${name}`]);
  at("figures").replaceChildren(...shown.map(([value, label]) => {
    const box = make("div", undefined, "figure");
    box.append(make("b", String(value)), make("span", label));
    return box;
  }));
}

function chart(id, lines, high) {
  const width = Math.max(at(id).clientWidth, 240), height = high ? 240 : 130, pad = {left: 46, right: 12, top: 10, bottom: 24};
  const points = lines.flatMap((line) => line.points);
  if (!points.length) return at(id).replaceChildren(make("p", "Nothing to show yet.", "none"));
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), high ? Math.min(...ys) : 0, Math.max(...ys)];
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (y0 === y1) { y1 += Math.abs(y1) * .1 || 1; y0 = high ? y0 - Math.abs(y0) * .1 : 0; }
  const X = (x) => pad.left + (x - x0) / (x1 - x0) * (width - pad.left - pad.right);
  const Y = (y) => height - pad.bottom - (y - y0) / (y1 - y0) * (height - pad.top - pad.bottom);
  const found = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": lines.map((line) => line.name).join(", ")});
  for (let step = 0; step <= (high ? 4 : 2); step++) {
    const y = y0 + (y1 - y0) * step / (high ? 4 : 2);
    found.append(svg("line", {class: "grid", x1: pad.left, x2: width - pad.right, y1: Y(y), y2: Y(y)}));
    found.append(svg("text", {x: pad.left - 6, y: Y(y) + 4, "text-anchor": "end"}, high ? y.toPrecision(3) : Math.round(10 * y) / 10));
  }
  found.append(svg("text", {x: pad.left, y: height - 6}, `round ${Math.max(Math.ceil(x0), 0)}`));
  found.append(svg("text", {x: width - pad.right, y: height - 6, "text-anchor": "end"}, `${Math.floor(x1)}`));
  lines.forEach((line, place) => {
    const group = svg("g", {class: `c${(line.color ?? place) % 7}`});
    const path = line.points.map((p, i) => `${i ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
    group.append(svg("path", {d: path}));
    if (line.points.length < 40) for (const p of line.points) group.append(svg("circle", {cx: X(p[0]), cy: Y(p[1]), r: 2.5}));
    found.append(group);
  });
  at(id).replaceChildren(found);
}

function quality(status) {
  const evaluated = status.rounds.filter((row) => row.quality !== null);
  const names = [...new Set(evaluated.flatMap((row) => Object.keys(row.sizes)))];
  const lines = [{name: "server", points: evaluated.map((row) => [row.round, row.quality])}];
  for (const name of names)
    lines.push({name, points: evaluated.filter((row) => name in row.sizes).map((row) => [row.round, row.sizes[name]])});
  at("quality-title").textContent = `${status.metric} per size` + (status.smaller_is_better ? " (smaller is better)" : "");
  chart("quality", lines.filter((line) => line.points.length), true);
  at("legend").replaceChildren(...(evaluated.length ? lines : []).map((line, place) => {
    const entry = make("span");
    entry.append(make("i", undefined, `c${place % 7}`), `${line.name} ${line.points.length ? line.points[line.points.length - 1][1].toFixed(4) : ""}`);
    return entry;
  }));
}

function bars(id, rows, none) {
  const most = Math.max(...rows.map((row) => row[1]), 0) || 1;
  at(id).replaceChildren(...(rows.length ? rows.map(([name, value, label]) => {
    const row = make("div", undefined, "bar"), back = make("div"), front = make("i");
    front.style.width = `${Math.max(100 * value / most, value ? 1 : 0)}%`;
    back.append(front);
    row.append(make("span", name), back, make("b", label));
    return row;
  }) : [make("p", none, "none")]));
}

function table(id, heads, rows) {
  const body = rows.map((cells) => {
    const row = make("tr");
    row.append(...cells.map((cell) => make("td", String(cell))));
    return row;
  });
  const head = make("tr");
  head.append(...heads.map((word) => make("th", word)));
  at(id).replaceChildren(...(rows.length ? [head, ...body] : []));
}

// A line of the log as it is, or of one that is kept as JSON what a person reads.
function logged(line) {
  try {
    const {time, level, message} = JSON.parse(line);
    return typeof message === "string" ? `${String(time).slice(0, 19).replace("T", " ")} ${level} ${message}` : line;
  } catch {
    return line;
  }
}

function show(status) {
  document.title = `${status.name} – fairfold`;
  at("name").textContent = status.name;
  at("state").textContent = status.state;
  at("state").className = `state ${status.state}`;
  at("problem").hidden = !status.problem;
  at("problem").textContent = status.problem;
  const labels = {online: "connected now", offline: "enrolled, and away", registered: "enrolled, never there"};
  const devices = Object.entries(status.devices).map(([state, count]) => [labels[state] || state, count]);
  const rows = (of) => of.map(([name, count]) => [name, count, String(count)]);
  bars("nodes", rows(devices), status.problem ? "Not known." : "None has enrolled.");
  if (!("rounds" in status)) return;
  const ago = Math.max(status.now - status.changed, 0);
  const end = status.stopped ? `: ${status.stopped}` : "";
  at("about").textContent = `${status.algorithm}, ${status.method}, ${status.capacities} · last change ${seconds(ago)} ago${end}`;
  at("privacy").textContent = status.privacy_notes.join(" ");
  figures(status);
  quality(status);
  chart("updates", [{name: "updates", color: 2, points: status.rounds.map((row) => [row.round, row.clients])}], false);
  const phases = {nodes: "finding nodes", tasks: "making tasks", masks: "secure aggregation", updates: "waiting for updates", step: "the server's step", saving: "saving"};
  bars("phases", Object.entries(status.phases).map(([name, spent]) => [phases[name] || name, spent, seconds(spent)]), "Only runs over a network have phases.");
  const sizes = Object.entries(status.nodes.by_size).map(([size, count]) => [`size ${size}`, count]);
  const states = [["known, and take part", status.nodes.known], ["have replied", status.nodes.replied],
    ["in the last round", status.nodes.last_round], ["cannot take part", status.nodes.refused]];
  const taking = status.nodes.known || status.nodes.refused ? [...states, ...sizes] : [];
  bars("nodes", rows([...devices, ...taking]), "Only runs over a network have nodes.");
  bars("reasons", Object.entries(status.reasons).sort((a, b) => b[1] - a[1]).map(([why, count]) => [why, count, String(count)]), "None.");
  table("left", ["round", "node", "why"], [...status.refused.map((row) => ["–", row.node, row.why]), ...status.left_out.map((row) => [row.round, row.node, row.why])]);
  at("failures-section").hidden = !status.failures.length;
  table("failures", ["round", "why"], status.failures.map((row) => [row.round, row.why]));
  const log = at("log"), end_seen = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.textContent = status.log.map(logged).join("\n") || "Nothing yet.";
  if (end_seen) log.scrollTop = log.scrollHeight;  // the newest line, unless the reader has scrolled up
}

async function look() {
  try {
    const response = await fetch("status.json", {headers});
    if (!response.ok) throw new Error(await response.text());
    show(await response.json());
    document.body.dataset.wide = String(document.documentElement.scrollWidth > innerWidth);  // for tests
    document.body.dataset.looked = String(Number(document.body.dataset.looked || 0) + 1);
  } catch (error) {
    at("state").textContent = "no answer";
    at("state").className = "state lost";
    at("problem").hidden = false;
    at("problem").textContent = `The page cannot be brought up to date: ${error.message}`;
  }
  setTimeout(look, PAUSE);
}

look();
