// Keeps the page at the state of the run: the stream of events says when to ask for the status and the curves again.

import { $, duration, el, facts, setText, size } from "./dom.js";
import { Charts, metricNames } from "./charts.js";
import { compareRuns } from "./runs.js";
import { csv, drawBytes, drawEvents, drawSettings, drawVersions, json, showRound } from "./sections.js";
import { follow, getJSON, getSized, Gone, keepToken, NeedsToken, reached, takeToken } from "./server.js";
import { showSite, SiteTable } from "./sites.js";
import { drawTimeline, Rounds } from "./timeline.js";

const QUIET_MS = 5000,
  SOON_MS = 1000,
  KEPT = 2000;
const charts = new Charts(),
  table = new SiteTable(() => draw());
const SHARE = 150, // a viewer's requests take 1 / SHARE of the server's time: five viewers are to cost it little
  CHARS_A_MS = 2e4; // what a server writes of a status in a millisecond; the time of an answer has the network's, too
let status,
  events,
  rounds,
  after,
  busy,
  due,
  cost = 0,
  opened = {};

function forget() {
  events = [];
  rounds = new Rounds();
  after = null;
  charts.forget();
}

function link(kind, text) {
  $("link").className = kind;
  setText($("link"), text);
}

const standing = (s) => (s?.stored ? "stored" : s?.finished || s?.failed ? "ended" : s?.paused ? "paused" : "live");

const MODES = { swarm: "swarm: workers aggregate", asynchronous: "asynchronous: no site waits" };

const hash = () => new URLSearchParams(location.hash.slice(1));

function draw() {
  if (!status) return;
  const metric = metricNames(status)[0],
    chosen = hash().get("site"),
    { headline } = status;
  const over = status.finished || status.failed || status.stored;
  document.title = `${headline?.act ? "(!) " : ""}${status.name} – Atoll`;
  setText($("name"), status.name);
  setText(
    $("about"),
    [`run ${status.run.slice(0, 8)}`, MODES[status.mode], status.algorithm || "no model", status.policy]
      .filter(Boolean)
      .join(" · "),
  );
  setText($("sentence"), headline?.text || "");
  $("headline").className = headline?.act ? "act" : headline?.held_up || headline?.late.length ? "held" : "";
  const command = reached(headline?.command || "", status);
  $("next").hidden = !command;
  setText($("command"), command);
  setText($("act"), headline?.act ? `A person must act. ${command}` : "");
  const alive = status.workers.filter((each) => each.state === "alive").length;
  const front = status.fragments.reduce((low, each) => (!low || each.round < low.round ? each : low), null);
  facts($("figures"), [
    ["Round", front ? `${front.round}${status.rounds ? ` of ${status.rounds}` : ""}` : "–", "round-number"],
    [
      "Version",
      status.fragments.length ? String(Math.min(...status.fragments.map((each) => each.version))) : "–",
      "version",
    ],
    ["Sites alive", status.workers.length ? `${alive} of ${status.workers.length}` : "none has joined", "alive"],
    ["Time left", over ? (status.finished || status.failed ? "ended" : "no server") : status.left_s === null ? "not known" : duration(status.left_s), "left"],
    ["Aggregated at", front?.place?.aggregator || "", "aggregator"],
    ["Received", size(status.bytes_up), "up"],
    ["Sent", size(status.bytes_down), "down"],
    ["Deaths", String(status.deaths), "deaths"],
    ["Refused", String(status.refused), "refused"],
  ]);
  $("warnings").hidden = !status.warnings.length;
  $("warnings").replaceChildren(...status.warnings.map((each) => el("li", {}, each)));
  table.draw(status, metric, chosen);
  drawBytes(status);
  if (!document.activeElement?.closest("#version-table")) drawVersions(status, metric);
  drawEvents(events);
  drawTimeline(rounds, status, $("find").value.trim(), !over);
}

// Ask for the status, and draw all. The more an answer costs, the rarer it is asked for.
async function refresh() {
  if (busy) return;
  busy = true;
  try {
    let chars;
    [status, chars] = await getSized("v1/status");
    cost = chars / CHARS_A_MS;
    draw();
    open();
    await charts.refresh(status, hash().get("site"));
    await compareRuns(status);
  } catch (error) {
    if (error instanceof NeedsToken) askForToken(error.message);
    else link("lost", error.message);
  } finally {
    busy = false;
    if (!status?.stored) plan(Math.max(QUIET_MS, SHARE * cost));
  }
}

function plan(ms) {
  const at = performance.now() + ms;
  if (due && due.at <= at) return;
  clearTimeout(due?.timer);
  due = {
    at,
    timer: setTimeout(() => {
      due = null;
      refresh();
    }, ms),
  };
}

function take(page) {
  for (const event of page.events) {
    rounds.take(event);
    charts.take(event);
    after = event.number;
    if (event.number <= (events.at(-1)?.number || 0)) continue; // the rest of a large round, or told again
    events.push(event.summary ? { ...event, summary: { ...event.summary, sites: [] } } : event);
  }
  if (page.within) after -= 1; // its last event is not complete: after a cut, ask for it again
  events = events.slice(-KEPT);
  plan(Math.max(SOON_MS, SHARE * cost));
}

async function listen() {
  for (let pause = 500; ; pause = Math.min(2 * pause, 10000)) {
    try {
      link("live", standing(status));
      await follow(after, (page) => {
        pause = 500;
        take(page);
      });
      if (status.stored || status.finished || status.failed) break;
      await refresh();
      if (status.finished || status.failed) break;
    } catch (error) {
      if (error instanceof NeedsToken) return askForToken(error.message);
      if (error instanceof Gone) forget();
    }
    link("lost", "no answer from the server; asking again");
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
  await refresh();
  clearTimeout(due?.timer);
  link("", status.stored || "the run is over");
  draw();
}

function askForToken(why) {
  clearTimeout(due?.timer);
  $("main").hidden = true;
  $("ask").hidden = false;
  setText($("why"), why);
  link("lost", "not connected");
  $("token").value = "";
  $("token").focus();
}

// What the address names: #site=NAME, #round=NUMBER, or both.
function open() {
  const wanted = { site: hash().get("site"), round: Number(hash().get("round")) || 0 };
  showSite(status, wanted.site);
  if (wanted.site && wanted.site !== opened.site)
    (document.getElementById(`row-${wanted.site}`) || $("detail")).scrollIntoView({ block: "center" });
  if (wanted.site !== opened.site) charts.choose(wanted.site);
  if (wanted.round !== opened.round)
    showRound(status, wanted.round, metricNames(status)[0]).then?.((shown) =>
      shown?.scrollIntoView({ block: "center" }),
    );
  opened = wanted;
}

async function start() {
  forget();
  try {
    status = await getJSON("v1/status");
  } catch (error) {
    if (error instanceof NeedsToken) return askForToken(error.message);
    link("lost", `${error.message || "no answer"}; asking again`);
    return setTimeout(start, 2000);
  }
  $("ask").hidden = true;
  $("main").hidden = false;
  draw();
  refresh();
  listen();
}

takeToken();
$("ask").onsubmit = (event) => {
  event.preventDefault();
  keepToken($("token").value);
  start();
};
$("copy").onclick = async () => {
  getSelection().selectAllChildren($("command"));
  await navigator.clipboard?.writeText($("command").textContent).catch(() => {});
  setText($("copy"), "Copied");
  setTimeout(() => setText($("copy"), "Copy"), 2000);
};
$("csv").onclick = () => csv();
$("json").onclick = () => json(status, events);
$("print").onclick = () => print();
$("settings").querySelector("details").ontoggle = drawSettings;
addEventListener("hashchange", () => {
  if (new URLSearchParams(location.hash.slice(1)).has("token")) {
    takeToken();
    start();
  } else if (status) {
    draw();
    open();
  }
});
addEventListener("resize", () => draw());
start();
