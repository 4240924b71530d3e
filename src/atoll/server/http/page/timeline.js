// The timeline: for each site, how it spent the last rounds. Times are those of the server's events.

import { $, el, duration, number } from "./dom.js";

const ROUNDS = 20, LANES = 30;

export class Rounds {
  constructor() {
    this.known = new Map(); // "fragment:round" → its times and sites
  }

  of({ fragment, round }) {
    const key = `${fragment}:${round}`;
    if (!this.known.has(key)) this.known.set(key, { fragment, round, sites: new Map() });
    while (this.known.size > ROUNDS + 1) this.known.delete(this.known.keys().next().value);
    return this.known.get(key) || { sites: new Map() };
  }

  site(event) {
    const sites = this.of(event).sites;
    if (!sites.has(event.site)) sites.set(event.site, {});
    return sites.get(event.site);
  }

  take(event) {
    const at = Date.parse(event.at);
    if (!this.last || at > this.last.at) this.last = { at, seen: performance.now() };
    switch (event.what) {
      case "round opened": this.of(event).opened = at; break;
      case "ticket issued": Object.assign(this.site(event), { begun: at, ended: undefined }); break;
      case "update accepted": Object.assign(this.site(event), { ended: at, send: event.send_seconds * 1000 }); break;
      case "update refused": Object.assign(this.site(event), { ended: at, refused: event.reason }); break;
      case "site sat out": Object.assign(this.site(event), { ended: at, satOut: true }); break;
      case "round closed": this.of(event).closed = at; break;
      case "round ended":
        this.of(event).over = at;
        for (const each of event.summary.sites) Object.assign(this.site({ ...event, site: each.site }), { train: each.train_seconds * 1000, facts: each });
    }
  }

  // What a site did in a round: [from, to, kind], in milliseconds of the server's clock.
  spans(round, site, now) {
    const own = round.sites.get(site);
    if (!own?.begun) return [];
    const end = own.ended ?? now, send = Math.min(own.send || 0, end - own.begun);
    const sent = end - send, train = own.ended && own.train !== undefined ? Math.min(own.train, sent - own.begun) : sent - own.begun;
    const wait = own.ended ? Math.max(round.over ?? round.closed ?? now, end) : end;
    return [[own.begun, sent - train, "pull"], [sent - train, sent, "train"], [sent, end, "send"], [end, wait, "wait"]].filter(([from, to]) => to > from);
  }
}

export function drawTimeline(rounds, workers, find, live) {
  const shown = [...rounds.known.values()].slice(-ROUNDS), place = $("lanes");
  const begin = Math.min(...shown.map((each) => each.opened ?? Infinity));
  if (!rounds.last || !Number.isFinite(begin)) return place.replaceChildren("No round has begun.");
  const now = rounds.last.at + (live ? performance.now() - rounds.last.seen : 0), end = Math.max(now, begin + 1);
  const style = getComputedStyle(document.documentElement), colour = (kind) => style.getPropertyValue(`--${kind}`);
  const sites = workers.map((each) => each.site).filter((each) => each.includes(find));
  const scale = el("p", { class: "hint" }, `${shown.length} ${shown.length === 1 ? "round" : "rounds"} in ${duration((end - begin) / 1000)}; lines mark the ends of rounds.`);
  const more = sites.length > LANES ? el("p", { class: "hint" }, `${sites.length - LANES} more sites: find one by its name under Sites.`) : "";
  const lanes = sites.slice(0, LANES).map((site) => {
    const canvas = el("canvas", { role: "img", width: 0, height: 22 });
    return { site, canvas, lane: el("div", { class: "lane" }, el("a", { href: `#site=${site}`, title: site }, site), canvas) };
  });
  place.replaceChildren(scale, ...lanes.map((each) => each.lane), ...(more ? [more] : []));
  const width = lanes.length ? Math.max(lanes[0].lane.clientWidth - lanes[0].lane.firstChild.clientWidth - 12, 50) : 0, ratio = devicePixelRatio || 1;
  for (const { site, canvas } of lanes) {
    canvas.width = width * ratio;
    canvas.height = 22 * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = "22px";
    const pen = canvas.getContext("2d"), x = (at) => ((at - begin) / (end - begin)) * canvas.width;
    let last = [];
    for (const round of shown) {
      for (const [from, to, kind] of last = rounds.spans(round, site, now)) {
        pen.fillStyle = colour(kind);
        pen.fillRect(x(from), 3 * ratio, Math.max(x(to) - x(from), ratio), 16 * ratio);
      }
    }
    pen.fillStyle = colour("ink");
    for (const { over } of shown) if (over) pen.fillRect(Math.round(x(over)) - 1, 0, ratio, canvas.height);
    const told = last.map(([from, to, kind]) => `${kind} ${duration((to - from) / 1000)}`).join(", ");
    canvas.setAttribute("aria-label", `${site}, newest round: ${told || "nothing"}`);
  }
}

export function roundTable(summary, metric) {
  const rows = summary.sites.map((each) => el("tr", {},
    el("th", { class: "text", scope: "row" }, el("a", { href: `#site=${each.site}` }, each.site)),
    ...[number(each.weight), each.steps || "–", number(each.metrics[metric]), duration(each.train_seconds), duration(each.wait_seconds), each.nbytes, number(each.norm)]
      .map((text) => el("td", {}, String(text)))));
  const head = ["Site", "Weight", "Steps", metric || "Metric", "Trained", "Waited", "Bytes", "Norm"];
  return el("table", {}, el("thead", {}, el("tr", {}, ...head.map((each, place) => el("th", { scope: "col", class: place ? "" : "text" }, each)))), el("tbody", {}, ...rows));
}
