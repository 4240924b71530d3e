// The table of sites, and what is known of one of them.

import { $, el, duration, facts, median, number, setText, size } from "./dom.js";

const ROWS = 100,
  LATE = 2;
// title, what sorts the rows, class, explanation
const COLUMNS = [
  ["Site", (w) => w.site, "text", ""],
  ["State", (w) => rank(w), "text long", ""],
  ["Step", (w) => w.step, "", "local steps of the site's process"],
  ["Speed", (w) => w.steps_per_s, "", "local steps a second, and against the median of the sites"],
  ["Rounds", (w) => w.rounds, "", "updates of the site that count"],
  ["Behind", (w) => behind(w), "", "versions that came after the one from which the site trains now"],
  ["Weight", (w) => w.last?.weight, "", "weight of its last update in the mean, such as its number of samples"],
  ["Metric", (w) => w.shownMetric, "", "what the site reported last"],
  ["Norm", (w) => w.last?.norm, "", "length (L2 norm) of its last update: how far the model moved there"],
  ["Sent", (w) => w.bytes_up, "", "bytes from the site since the server's start; –: none were counted"],
  ["Received", (w) => w.bytes_down, "", "bytes to the site since the server's start; –: none were counted"],
  ["Last message", (w) => w.last_heartbeat_s, "", ""],
];
const behind = (w) => (w.ticket_s > 0 ? w.staleness : null);
const rank = (w) =>
  w.state === "failed" ? 0 : w.state === "dead" ? 1 : w.refused ? 2 : w.late ? 3 : w.awaited ? 4 : w.state === "alive" ? 5 : 6;
const note = (w) => w.error || w.refused || w.waits || "";

const stateOf = (w) => (w.state !== "alive" ? w.state : w.refused ? "its updates are refused" : w.doing || "alive");

export class SiteTable {
  constructor(redraw) {
    Object.assign(this, { by: 1, down: false, all: false });
    $("table").tHead.append(
      el(
        "tr",
        {},
        ...COLUMNS.map(([title, , kind, explained], place) => {
          const button = el("button", { type: "button", title: explained }, title);
          button.onclick = () => {
            this.down = this.by === place && !this.down;
            this.by = place;
            redraw();
          };
          return el("th", { class: kind || "", scope: "col" }, button);
        }),
      ),
    );
    facts(
      $("columns"),
      COLUMNS.map(([title, , , explained]) => [title, explained]),
    );
    $("find").oninput = redraw;
    this.more = el("button", {
      type: "button",
      onclick: () => {
        this.all = true;
        redraw();
      },
    });
  }

  draw(status, metric, chosen) {
    const middle = median(status.workers.map((each) => each.steps_per_s));
    const pace = median(status.workers.map((each) => each.last?.train_seconds || 0));
    const waits = new Map(status.fragments.flatMap((each) => each.waiting_for.map((m) => [m.site, m.for_s])));
    const workers = status.workers.map((w) => ({
      ...w,
      awaited: waits.has(w.site),
      late: status.headline?.late.includes(w.site),
      shownMetric: w.last?.metrics[metric] ?? w.metrics[metric],
      waits: waits.has(w.site)
        ? `The round waits for it, ${duration(waits.get(w.site))} so far.`
        : status.headline?.late.includes(w.site)
          ? `It is late: ${duration(w.ticket_s)} for its update; usually ${duration(w.usual_s)}.`
          : "",
    }));
    const value = COLUMNS[this.by][1],
      sign = this.down ? -1 : 1;
    workers.sort((a, b) => {
      const [x, y] = [value(a) ?? -Infinity, value(b) ?? -Infinity];
      return (x < y ? -sign : x > y ? sign : 0) || (a.site < b.site ? -1 : 1);
    });
    const found = workers.filter((w) => w.site.includes($("find").value.trim()));
    const rows = found.slice(0, this.all ? undefined : ROWS),
      rest = found.length - rows.length;
    this.more.textContent = `Show ${rest} more`;
    $("shown").replaceChildren(`${found.length} of ${workers.length} sites `, rest ? this.more : "");
    [...$("table").tHead.rows[0].cells].forEach((cell, place) => {
      cell.ariaSort = place === this.by ? (this.down ? "descending" : "ascending") : "none";
      if (place === 7) setText(cell.firstChild, metric || "Metric");
    });
    const focused = document.activeElement?.closest?.("#table tbody a")?.textContent;
    $("table").tBodies[0].replaceChildren(...rows.map((w) => this.row(w, middle, pace, chosen)));
    if (focused)
      [...$("table").tBodies[0].querySelectorAll("a")]
        .find((each) => each.textContent === focused)
        ?.focus({ preventScroll: true });
  }

  row(w, middle, pace, chosen) {
    const bad = w.state === "dead" || w.state === "failed" || w.refused;
    const ratio =
      w.steps_per_s && middle
        ? w.steps_per_s / middle
        : w.last?.train_seconds && pace
          ? pace / w.last.train_seconds
          : 0;
    const against =
      ratio > 1.05
        ? `${number(+ratio.toFixed(1))} × faster`
        : ratio < 0.95
          ? `${number(+(1 / ratio).toFixed(1))} × slower`
          : "as the median";
    const speed = !ratio
      ? "–"
      : el("div", {}, w.steps_per_s ? `${number(w.steps_per_s)}/s` : "", el("small", {}, against));
    const texts = [
      el("a", { href: `#site=${w.site}` }, w.site),
      el("div", {}, el("span", { class: bad ? "bad" : w.late ? "late" : "" }, stateOf(w)), note(w) && el("small", {}, note(w))),
      w.step || "–",
      speed,
      w.rounds,
      behind(w) ?? "–",
      number(w.last?.weight),
      number(w.shownMetric),
      number(w.last?.norm),
      w.bytes_up ? size(w.bytes_up) : "–",
      w.bytes_down ? size(w.bytes_down) : "–",
      w.heard ? `${duration(w.last_heartbeat_s)} ago` : "none yet",
    ];
    return el(
      "tr",
      { class: w.site === chosen ? "chosen" : "", id: `row-${w.site}` },
      ...texts.map((text, place) =>
        el(
          place ? "td" : "th",
          {
            class: `${COLUMNS[place][2] || ""} ${place === 3 && ratio && ratio < 1 / LATE ? "late" : ""}`,
            ...(place ? {} : { scope: "row" }),
          },
          typeof text === "object" ? text : String(text),
        ),
      ),
    );
  }
}

export function showSite(status, site) {
  const w = status.workers.find((each) => each.site === site),
    detail = $("detail");
  detail.hidden = !site;
  if (!site) return;
  if (!w) return detail.replaceChildren(el("p", {}, `No site ${site} has joined this run.`));
  const about = el("dl", {});
  facts(about, [
    ["Host", w.host || "–"],
    ["Joined", w.joined_at],
    ["Retries", `${w.retries}, ${w.reconnections} reconnections`],
    ["Steps a round", w.local_steps ? String(w.local_steps) : ""],
    ["Trained, last round", w.last ? duration(w.last.train_seconds) : "–"],
    ["Waited, last round", w.last ? duration(w.last.wait_seconds) : "–"],
    [
      "Labels",
      Object.entries(w.labels)
        .map((each) => each.join(" = "))
        .join(", "),
    ],
    [
      "Metrics",
      Object.entries(w.metrics)
        .map(([key, value]) => `${key} ${number(value)}`)
        .join(", "),
    ],
    ["Note", note(w)],
  ]);
  detail.replaceChildren(el("h3", {}, site, " ", el("a", { href: "#sites" }, "close")), about);
}
