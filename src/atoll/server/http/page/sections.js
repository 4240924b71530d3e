// The smaller sections: bytes, versions, events, settings, export.

import { $, el, duration, facts, fill, number, size } from "./dom.js";
import { evaluatedNames, metricNames } from "./charts.js";
import { roundTable } from "./timeline.js";
import { download, getJSON, reached, save } from "./server.js";

export function drawBytes(status) {
  const updates = status.history.flatMap((each) => each.sites),
    whole = status.model_bytes / Math.max(status.fragments.length, 1);
  const mean = updates.reduce((sum, each) => sum + each.nbytes, 0) / (updates.length || 1);
  const trained = status.workers.filter((each) => each.gradient_bytes);
  const total = (key) => trained.reduce((sum, each) => sum + each[key], 0);
  const ring = trained.length > 1 ? ((2 * (trained.length - 1)) / trained.length) * total("gradient_bytes") : 0;
  facts($("moved"), [
    ["Updates received", size(status.bytes_up), "bytes-up"],
    ["Versions sent", size(status.bytes_down), "bytes-down"],
    ["An update", mean ? size(mean) : "–"],
    [
      `Codec ${status.codec}`,
      !mean
        ? "–"
        : whole / mean < 1.05
          ? "updates as large as their tensors"
          : `${(whole / mean).toFixed(1)} × smaller than their tensors (${size(whole)})`,
    ],
    ["Versions travel", status.downlink_codec === "none" ? "whole" : `as differences, ${status.downlink_codec}`],
    [
      `H = ${status.sync_every} steps`,
      status.sync_every && ring && total("bytes_up")
        ? `data-parallel training would have sent ${size(ring)} in place of ${size(total("bytes_up"))}: ${(ring / total("bytes_up")).toFixed(0)} ×`
        : "",
    ],
    ["Counted since", "the server's start"],
  ]);
}

const picked = new Set();

export function drawVersions(status, metric) {
  const rounds = status.history.filter((each) => each.version !== null).reverse();
  const serves = status.address && !status.stored && !status.finished && !status.failed,
    dir = status.state_dir || "STATE_DIR",
    kept = new Set(status.kept_versions),
    evaluated = evaluatedNames(status);
  $("versions-hint").replaceChildren(
    "The last rounds; what sites report in a round is of the version before it. Choose two versions to compare them, or save one as a safetensors file. On the command line: ",
    el(
      "code",
      {},
      reached(`atoll export ${serves ? `--server ${status.address}` : `--dir ${quoted(dir)}`} model.safetensors`, status),
    ),
    status.best?.file ? `. The best version is kept in ${status.best.file}` : "",
    ". A durable version is safely on the server's disk, also after a power cut. Step norm: how far the sites together moved the model.",
  );
  fill(
    $("version-table"),
    [
      ["Version", "text"],
      ["Round"],
      [metric || "Metric"],
      ...evaluated.map((name) => [`${name} at the server`]),
      ["Updates"],
      ["Received"],
      ["Step norm"],
      ["Aggregated in"],
      ["Compare"],
      ["Model"],
    ],
    rounds.map((each) => {
      const box = el("input", {
        type: "checkbox",
        checked: picked.has(each.version),
        ariaLabel: `Compare version ${each.version}`,
      });
      box.onchange = () => {
        picked[box.checked ? "add" : "delete"](each.version);
        compare(status);
      };
      const marks = [
        each.version === status.best?.version ? "best" : "",
        each.version === status.durable_version ? "durable" : "",
      ]
        .filter(Boolean)
        .join(", ");
      return {
        cells: [
          `${each.version}${marks ? ` (${marks})` : ""}`,
          el("a", { href: `#round=${each.round}` }, String(each.round)),
          number(each.metrics[metric]),
          ...evaluated.map((name) => number(each.global_metrics[name])),
          `${each.sites.length} of ${each.expected || each.sites.length}`,
          size(each.bytes_up),
          number(each.grad_norm),
          duration(each.seconds),
          box,
          kept.has(each.version) ? saveButton(each.version) : "not kept",
        ],
      };
    }),
  );
}

const quoted = (path) => (/^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`);

function saveButton(version) {
  const button = el("button", { type: "button", ariaLabel: `Save version ${version} as safetensors` }, "Save");
  button.onclick = async () => {
    button.disabled = true;
    await download(`v1/versions/${version}/model.safetensors`, `version-${version}.safetensors`).catch((error) =>
      button.replaceWith(error.message),
    );
    button.disabled = false;
  };
  return button;
}

function compare(status) {
  const [a, b] = [...picked]
    .slice(-2)
    .sort((x, y) => x - y)
    .map((version) => status.history.find((each) => each.version === version));
  if (!a || !b) return $("compared").replaceChildren();
  const rows = metricNames(status)
    .map((name) => [name, a.metrics[name], b.metrics[name]])
    .filter(([, x, y]) => x != null || y != null)
    .concat(
      evaluatedNames(status).map((name) => [`${name} at the server`, a.global_metrics[name], b.global_metrics[name]]),
    )
    .concat([
      ["bytes received", a.bytes_up, b.bytes_up],
      ["step norm", a.grad_norm, b.grad_norm],
      ["updates", a.sites.length, b.sites.length],
    ]);
  const table = el("table", {}, el("thead"), el("tbody"));
  fill(
    table,
    [["", "text"], [`Version ${a.version}`], [`Version ${b.version}`], ["Change"]],
    rows.map(([name, x, y]) => ({ cells: [name, number(x), number(y), x != null && y != null ? number(y - x) : "–"] })),
  );
  $("compared").replaceChildren(el("h3", {}, `Version ${a.version} and version ${b.version}`), table);
}

export async function showRound(status, number_, metric) {
  const old = $("round");
  if (!number_) return old?.remove();
  let summary = status.history.find((each) => each.round === number_);
  if (!summary) {
    // an older one: by its version, one number a request
    const names = ["weight", "steps", "train_seconds", "wait_seconds", "nbytes", "norm", `metrics.${metric}`],
      sites = new Map();
    for (const value of names) {
      const page = await getJSON(`v1/site-curves?value=${encodeURIComponent(value)}&first=${number_}&last=${number_}`);
      if (page.rounds[0] === number_)
        for (const { site, values } of page.curves)
          sites.set(site, {
            ...(sites.get(site) || { site, metrics: {} }),
            [value]: values[0],
            ...(value.startsWith("metrics.") ? { metrics: { [metric]: values[0] } } : {}),
          });
    }
    summary = { sites: [...sites.values()] };
  }
  const told = summary.sites.length
    ? el(
        "div",
        { class: "wide", tabIndex: 0, role: "region", ariaLabel: `Round ${number_}` },
        roundTable(summary, metric),
      )
    : el("p", {}, "No update of this round is known.");
  const shown = el(
    "div",
    { id: "round" },
    el("h3", {}, `Round ${number_} `, el("a", { href: "#timeline" }, "close")),
    told,
  );
  old ? old.replaceWith(shown) : $("timeline").append(shown);
  return shown;
}

const WORDS = {
  "site joined": (e) => `${e.site} joined${e.again ? " again" : ""}`,
  "site left": (e) => `${e.site} left${e.reason ? `: ${e.reason}` : ""}`,
  "site silent": (e) => `${e.site} is silent: ${e.reason}`,
  "round opened": (e) => `round ${e.round} opened for ${list(e.expected)}`,
  "ticket issued": (e) => `${e.site} begins round ${e.round}`,
  "update accepted": (e) => `${e.site}: update of round ${e.round} accepted`,
  "update refused": (e) => `${e.site}: update of round ${e.round} refused: ${e.reason}`,
  "site sat out": (e) => `${e.site} sits out round ${e.round}`,
  "round closed": (e) => `round ${e.round} closed with ${list(e.sites)}`,
  "round reopened": (e) => `round ${e.round} opened again: ${e.reason}`,
  "round ended": (e) =>
    e.summary.version === null
      ? `round ${e.round} ended without a version`
      : `round ${e.round} made version ${e.summary.version}`,
  "task opened": (e) => `task ${e.task} to ${list(e.sites)}`,
  "task answered": (e) => `${e.site} answered ${e.task}${e.error ? `: ${e.error}` : ""}`,
  "version evaluated": (e) =>
    e.problem
      ? `version ${e.version} was not evaluated: ${e.problem}`
      : `version ${e.version} evaluated: ${Object.entries(e.metrics)
          .map(([name, value]) => `${name} ${number(value)}`)
          .join(", ")}`,
  "run paused": () => "the run is paused",
  "run resumed": () => "the run goes on",
  "run stopping": () => "the run is being stopped: this is its last round",
  "went back": (e) => `the run goes on from version ${e.version}`,
  "run stalled": (e) => `nothing has arrived for ${duration(e.seconds)}: ${e.reason}`,
  warning: (e) => `warning: ${e.text}`,
  "run finished": () => "the last round has ended",
  "run failed": (e) => `the run failed: ${e.reason}`,
};
const list = (sites) =>
  sites.length > 4 ? `${sites.slice(0, 3).join(", ")} and ${sites.length - 3} others` : sites.join(", ");

// The time of an event; with its date unless it is of today.
const clock = (at) =>
  (at.toDateString() === new Date().toDateString() ? "" : `${at.toLocaleDateString("sv")} `) +
  at.toLocaleTimeString([], { hour12: false });

export function drawEvents(events) {
  $("event-list").replaceChildren(
    ...events
      .slice(-200)
      .reverse()
      .map((each) =>
        el(
          "li",
          {},
          el("time", { dateTime: each.at, title: `event ${each.number}` }, clock(new Date(each.at))),
          el("span", {}, (WORDS[each.what] || (() => each.what))(each)),
        ),
      ),
  );
}

export async function drawSettings() {
  const { settings } = await getJSON("v1/settings");
  fill(
    $("setting-table"),
    [
      ["Setting", "text"],
      ["Value", "text long"],
      ["Source", "text"],
    ],
    settings.map((each) => ({ cells: [each.key, each.value || "not set", each.source] })),
  );
}

export const csv = () => download("v1/updates.csv", "updates.csv");

export async function json(status, events) {
  const { settings } = await getJSON("v1/settings");
  save("run.json", new Blob([JSON.stringify({ status, events, settings }, null, 1)], { type: "application/json" }));
}
