// Several runs side by side: a metric's curve of each, and a table.

import { DARK, hue, plotOf } from "./charts.js";
import { $, el, fill, number, size } from "./dom.js";
import { getJSON } from "./server.js";

let runs = [],
  plot;

// Ask for the other runs, with pages at `status.compared`, and show them with this one.
export async function compareRuns(status) {
  if (runs.length || !status.compared.length) return;
  const others = status.compared.map(async (path) => ({ path, status: await getJSON(`${path}v1/status`) }));
  runs = [{ path: "", status }, ...(await Promise.all(others))];
  const names = [...new Set(runs.flatMap((each) => Object.keys(each.status.first)))].sort();
  $("metric").replaceChildren(...names.map((each) => el("option", { selected: each === "loss" }, each)));
  $("metric").onchange = draw;
  DARK.onchange = draw;
  new ResizeObserver(() => plot?.setSize({ width: $("run-plot").clientWidth, height: 240 })).observe($("run-plot"));
  $("runs").hidden = $("to-runs").hidden = false;
  await draw();
}

const label = ({ status }) => status.state_dir.replace(/\/state$/, "");

async function draw() {
  const name = $("metric").value,
    value = encodeURIComponent(name.startsWith("global.") ? name : `metrics.${name}`);
  const curves = await Promise.all(
    runs.map(({ path, status }) =>
      name in status.first ? getJSON(`${path}v1/site-curves?value=${value}&points=300`) : { rounds: [], mean: [] },
    ),
  );
  if (name !== $("metric").value) return; // another one was chosen meanwhile
  plot?.destroy();
  const series = runs.map((each, place) => ({ label: label(each), stroke: hue(place), width: 2 }));
  plot = plotOf($("run-plot"), uPlot.join(curves.map((each) => [each.rounds, each.mean])), series, {});
  $("run-plot").ariaLabel = `${name || "No metric"} over the rounds, a line for each run in the table`;
  const columns = [["Run", "text long"], ["Algorithm"], ["Rounds"], ["Sites"], ["Received"], ["Last"], ["Best (round)"]];
  fill($("run-table"), columns, runs.map((each, place) => ({ cells: cells(each, place, name, curves[place]) })));
}

function cells(run, place, name, { rounds, mean }) {
  const { status } = run,
    known = mean.filter((each) => each !== null),
    { metric, mode } = status.best || {};
  const best = Math[metric === name ? mode : name.endsWith("loss") ? "min" : "max"](...known);
  return [
    el("a", { href: run.path || "#learning" }, el("span", { class: "swatch", style: `background: ${hue(place)}` }), label(run)),
    status.algorithm,
    String(Math.max(0, ...status.history.map((each) => each.round))),
    String(status.workers.length),
    size(status.bytes_up),
    number(known.at(-1)),
    known.length ? `${number(best)} (${rounds[mean.indexOf(best)]})` : "–",
  ];
}
