// The timeline: for each site, how it spent the last rounds. Times are those of the server's events.

import { $, el, duration, number } from "./dom.js";

const ROUNDS = 20,
  LANES = 30;

export class Rounds {
  constructor() {
    this.known = new Map(); // "fragment:round" → when it opened and was over
    this.tickets = new Map(); // site → its last tickets, oldest first: when each began and ended
  }

  round({ fragment, round }) {
    const key = `${fragment}:${round}`,
      found = this.known.get(key) || {};
    this.known.set(key, found);
    if (this.known.size > ROUNDS + 1) this.known.delete(this.known.keys().next().value);
    return found;
  }

  ticket(event) {
    const own = this.tickets.get(event.site) || [],
      known = own.findLast((each) => each.ticket === event.ticket),
      found = known || { ticket: event.ticket };
    if (!known) this.tickets.set(event.site, [...own.slice(-3 * ROUNDS), found]);
    return found;
  }

  take(event) {
    const at = Date.parse(event.at);
    if (!this.last || at > this.last.at) this.last = { at, seen: performance.now() };
    switch (event.what) {
      case "round opened":
        this.round(event).opened = at;
        break;
      case "ticket issued":
        Object.assign(this.ticket(event), { begun: at, ended: undefined, then: "wait" });
        break;
      case "update accepted":
        Object.assign(this.ticket(event), { ended: at, send: event.send_seconds * 1000, then: "wait" });
        break;
      case "update refused":
      case "site sat out":
        Object.assign(this.ticket(event), { ended: at, then: event.what === "site sat out" ? "" : "refused" });
        break;
      case "site silent":
      case "site left":
        for (const each of this.tickets.get(event.site) || []) {
          if (each.ended === undefined) Object.assign(each, { ended: at, then: "" });
        }
        break;
      case "round ended":
        this.round(event).over = at;
        for (const { site, train_seconds } of event.summary.sites) {
          const counted = (this.tickets.get(site) || []).find((each) => each.then === "wait" && each.ended <= at && !each.over);
          if (counted) Object.assign(counted, { train: train_seconds * 1000, over: at });
        }
    }
  }

  // The clock of the server, from how long the open rounds have been open: an event may be old when the page gets it.
  know(status) {
    for (const { fragment, round, open_s } of status.fragments) {
      const { opened, over } = this.known.get(`${fragment}:${round}`) || {};
      if (opened && !over && opened + open_s * 1000 > this.now()) {
        this.last = { at: opened + open_s * 1000, seen: performance.now() };
      }
    }
  }

  now() {
    return this.last.at + performance.now() - this.last.seen;
  }

  // What a site did since `begin`: [from, to, kind], in milliseconds of the server's clock.
  spans(site, begin, now) {
    const own = this.tickets.get(site) || [],
      found = [];
    own.forEach(({ begun, ended, send, train, over, then }, place) => {
      if (begun === undefined) return;
      const end = ended ?? now,
        sent = end - Math.min(send || 0, end - begun),
        trained = Math.min(train ?? sent - begun, sent - begun);
      const next = own[place + 1]?.begun ?? over ?? now,
        wait = ended ? Math.max(end, Math.min(over ?? next, next)) : end;
      found.push(
        [begun, sent - trained, "pull"],
        [sent - trained, sent, "train"],
        [sent, end, "send"],
        [end, wait, then],
      );
    });
    return found
      .filter(([from, to, kind]) => kind && to > from && to > begin)
      .map(([from, to, kind]) => [Math.max(from, begin), to, kind]);
  }
}

export function drawTimeline(rounds, status, find, live) {
  const shown = [...rounds.known.values()].slice(-ROUNDS),
    place = $("lanes");
  const begin = Math.min(...shown.map((each) => each.opened ?? Infinity));
  if (!Number.isFinite(begin)) {
    return place.replaceChildren(!rounds.last && status.history.length ? "Loading …" : "No round has begun.");
  }
  rounds.know(status);
  const now = live ? rounds.now() : rounds.last.at,
    end = Math.max(now, begin + 1);
  const style = getComputedStyle(document.documentElement),
    colour = (kind) => style.getPropertyValue(`--${kind}`);
  const sites = status.workers.map((each) => each.site).filter((each) => each.includes(find));
  const scale = el(
    "p",
    { class: "hint" },
    `${shown.length} ${shown.length === 1 ? "round" : "rounds"} in ${duration((end - begin) / 1000)}; lines mark the ends of rounds.`,
  );
  const more =
    sites.length > LANES
      ? el("p", { class: "hint" }, `${sites.length - LANES} more sites: find one by its name under Sites.`)
      : "";
  const lanes = sites.slice(0, LANES).map((site) => {
    const canvas = el("canvas", { role: "img", width: 0, height: 22 });
    return {
      site,
      canvas,
      lane: el("div", { class: "lane" }, el("a", { href: `#site=${site}`, title: site }, site), canvas),
    };
  });
  place.replaceChildren(scale, ...lanes.map((each) => each.lane), ...(more ? [more] : []));
  const width = lanes.length ? Math.max(lanes[0].lane.clientWidth - lanes[0].lane.firstChild.clientWidth - 12, 50) : 0,
    ratio = devicePixelRatio || 1;
  for (const { site, canvas } of lanes) {
    canvas.width = width * ratio;
    canvas.height = 22 * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = "22px";
    const pen = canvas.getContext("2d"),
      x = (at) => ((at - begin) / (end - begin)) * canvas.width;
    const spans = rounds.spans(site, begin, now);
    for (const [from, to, kind] of spans) {
      pen.fillStyle = colour(kind);
      pen.fillRect(x(from), 3 * ratio, Math.max(x(to) - x(from), ratio), 16 * ratio);
    }
    pen.fillStyle = colour("ink");
    for (const { over } of shown) if (over) pen.fillRect(Math.round(x(over)) - 1, 0, ratio, canvas.height);
    const told = spans
      .slice(-3)
      .map(([from, to, kind]) => `${kind} ${duration((to - from) / 1000)}`)
      .join(", ");
    canvas.setAttribute("aria-label", `${site}, most recently: ${told || "nothing"}`);
  }
}

export function roundTable(summary, metric) {
  const rows = summary.sites.map((each) =>
    el(
      "tr",
      {},
      el("th", { class: "text", scope: "row" }, el("a", { href: `#site=${each.site}` }, each.site)),
      ...[
        number(each.weight),
        each.steps || "–",
        number(each.metrics[metric]),
        duration(each.train_seconds),
        duration(each.wait_seconds),
        each.nbytes,
        number(each.norm),
      ].map((text) => el("td", {}, String(text))),
    ),
  );
  const head = ["Site", "Weight", "Steps", metric || "Metric", "Trained", "Waited", "Bytes", "Norm"];
  return el(
    "table",
    {},
    el(
      "thead",
      {},
      el("tr", {}, ...head.map((each, place) => el("th", { scope: "col", class: place ? "" : "text" }, each))),
    ),
    el("tbody", {}, ...rows),
  );
}
