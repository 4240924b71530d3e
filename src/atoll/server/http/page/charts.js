// Curves of a metric over the rounds: the mean and the server's evaluation thick, sites thin, the best marked.

import { $, el, number } from "./dom.js";
import { getJSON } from "./server.js";

const POINTS = 300,
  MOST = 2, // rounds a curve, charts
  GLOBAL = "global.",
  EVALUATED = "at the server";
const WHOLE = [1, 2, 5].flatMap((each) => [0, 1, 2, 3, 4, 5].map((power) => each * 10 ** power)).sort((a, b) => a - b);
export const DARK = matchMedia("(prefers-color-scheme: dark)");
export const hue = (place) => `hsl(${(place * 137 + 20) % 360} 55% 55%)`;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Curves {
  constructor(value) {
    Object.assign(this, { value, rounds: [], versions: [], mean: [], sites: new Map(), evaluated: new Map() });
  }

  // What the server's evaluation has for this metric: the server chooses POINTS of the rounds that have it.
  async loadEvaluated(name) {
    const page = await getJSON(`v1/site-curves?value=${encodeURIComponent(GLOBAL + name)}&points=${POINTS}`);
    page.rounds.forEach((round, place) => this.evaluated.set(round, page.mean[place]));
    return this;
  }

  // Ask for all rounds; the server chooses POINTS of them.
  async load() {
    let after = "",
      last = "",
      page;
    do {
      page = await getJSON(
        `v1/site-curves?value=${encodeURIComponent(this.value)}&points=${POINTS}${last}&after=${after}`,
      );
      if (!after) Object.assign(this, { versions: page.versions, rounds: page.rounds, mean: page.mean });
      for (const { site, values } of page.curves) this.sites.set(site, values);
      last = `&last=${this.versions.at(-1)}`;
      after = page.after;
    } while (after);
    this.loaded = true;
    return this;
  }

  // Add a round that has ended since; a large one comes in several parts.
  take({ fragment, round, version, metrics, sites }) {
    const name = this.value.replace("metrics.", ""),
      last = this.versions.at(-1) ?? 0;
    if (!this.loaded || fragment || version === null || version < last) return;
    if (version > last) {
      this.versions.push(version);
      this.rounds.push(round);
      this.mean.push(metrics[name] ?? null);
    }
    for (const { site, metrics: own } of sites) if (name in own) this.sites.set(site, this.filled(site, own[name]));
    for (const site of this.sites.keys()) this.filled(site);
  }

  // All rounds of both, and the values there: [rounds, sites' values …, mean, evaluated].
  data() {
    const rounds = [...new Set([...this.rounds, ...this.evaluated.keys()])].sort((a, b) => a - b);
    const at = new Map(rounds.map((round, place) => [round, place])),
      same = rounds.length === this.rounds.length;
    const spread = (values) => {
      if (same) return values;
      const found = rounds.map(() => null);
      values.forEach((value, place) => (found[at.get(this.rounds[place])] = value));
      return found;
    };
    const evaluated = rounds.map((round) => this.evaluated.get(round) ?? null);
    return [rounds, ...[...this.sites.values()].map(spread), spread(this.mean), evaluated];
  }

  // The values of a site, as many as there are rounds; if `value` is given, it is the last one.
  filled(site, value) {
    const known = this.sites.get(site) || [];
    while (known.length < this.rounds.length) known.push(null);
    if (value !== undefined) known[known.length - 1] = value;
    return known;
  }
}

// A plot of lines over the rounds; `data`: the rounds, then the values of each of `series`.
export function plotOf(place, data, series, hooks) {
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
  const plot = new uPlot(
    {
      width: place.clientWidth || 400,
      height: 240,
      legend: { show: false },
      scales: { x: { time: false } },
      axes: [
        { ...axis, space: 60, size: 34, incrs: WHOLE },
        { ...axis, size: 58 },
      ],
      cursor: { focus: { prox: 24 }, drag: { x: true, y: false } },
      focus: { alpha: 0.25 },
      series: [{}, ...series.map((each) => ({ spanGaps: true, ...each }))],
      hooks,
    },
    data,
    place,
  );
  plot.root.querySelector("canvas").setAttribute("aria-hidden", "true");
  return plot;
}

class Chart {
  constructor(names, name) {
    this.name = name;
    this.choice = el("select", { ariaLabel: "Metric" });
    this.said = el("span", {});
    this.place = el("div", { role: "img" });
    this.figure = el("figure", {}, el("figcaption", {}, this.choice, this.said), this.place);
    this.choice.onchange = () => {
      this.name = this.choice.value;
      this.curves = null;
      this.isEvaluated = undefined;
      this.refresh(this.status, this.chosen);
    };
    this.offer(names);
    new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height: 240 })).observe(this.place);
  }

  offer(names) {
    if (names.join("\n") === this.offered) return;
    this.offered = names.join("\n");
    this.choice.replaceChildren(
      ...names.map((each) => el("option", { value: each, selected: each === this.name }, each)),
    );
  }

  async refresh(status, chosen) {
    Object.assign(this, { status, chosen, best: status.best });
    const before = this.isEvaluated;
    this.isEvaluated = GLOBAL + this.name in status.first;
    if (this.isEvaluated && before === false) this.curves = null;
    if (!this.curves || this.curves.rounds.length > 3 * POINTS) {
      const curves = (this.curves = new Curves(`metrics.${this.name}`));
      await curves.load();
      if (this.isEvaluated) await curves.loadEvaluated(this.name);
      if (curves !== this.curves) return; // another metric was chosen meanwhile
    }
    if (this.curves.loaded) this.draw();
  }

  draw() {
    const { sites } = this.curves;
    const names = [...sites.keys()],
      few = names.length <= 10,
      data = this.curves.data(), // the mean and the evaluation are drawn last, over the sites
      rounds = data[0];
    const look = names.join("\n") + this.chosen + DARK.matches;
    this.mark = this.marked();
    if (this.plot && look === this.look) this.plot.setData(data);
    else {
      this.plot?.destroy();
      this.look = look;
      const points = { show: rounds.length < 3 };
      this.plot = plotOf(
        this.place,
        data,
        [
          ...names.map((label, place) => ({
            label,
            width: label === this.chosen ? 2.5 : 1,
            points,
            stroke: label === this.chosen ? css("--link") : few ? hue(place) : css("--soft") + "66",
          })),
          { label: "mean", stroke: css("--global"), width: 3, points },
          {
            label: EVALUATED,
            stroke: css("--link"),
            width: 3,
            dash: [8, 5],
            points: { show: this.curves.evaluated.size < 30, fill: css("--link") },
          },
        ],
        {
          draw: [(plot) => this.drawMark(plot)],
          setSeries: [(_, index, { focus }) => this.say((this.focused = focus ? index : 0))],
          setCursor: [() => this.say()],
        },
      );
    }
    this.say();
    this.place.ariaLabel = `${this.name} over ${rounds.length} rounds: ${this.said.textContent}`;
  }

  marked() {
    const { rounds, mean } = this.curves,
      best = this.best;
    if (best?.metric?.replace(GLOBAL, "") === this.name && best.value !== null)
      return { round: best.round, value: best.value, text: "best" };
    const known = mean.filter((each) => each !== null);
    if (!known.length || this.name !== "loss") return null;
    const value = Math.min(...known);
    return { round: rounds[mean.indexOf(value)], value, text: "lowest" };
  }

  drawMark(plot) {
    if (!this.mark) return;
    const { ctx, bbox } = plot,
      x = plot.valToPos(this.mark.round, "x", true),
      y = plot.valToPos(this.mark.value, "y", true);
    const ratio = devicePixelRatio || 1,
      right = x > bbox.left + bbox.width * 0.8;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = css("--best");
    ctx.lineWidth = 2 * ratio;
    ctx.beginPath();
    ctx.arc(x, y, 5 * ratio, 0, 7);
    ctx.stroke();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = right ? "right" : "left";
    const place = [
      `${this.mark.text} ${number(this.mark.value)}`,
      x + (right ? -9 : 9) * ratio,
      Math.min(y + 22 * ratio, bbox.top + bbox.height - 4 * ratio),
    ];
    ctx.strokeStyle = css("--card");
    ctx.lineWidth = 4 * ratio;
    ctx.strokeText(...place);
    ctx.fillText(...place);
    ctx.restore();
  }

  // The value at the pointer, else the last one, and what it is compared with: the first recorded value.
  told(values, rounds, name, at) {
    const place = at ?? values.findLastIndex((each) => each !== null);
    if (place < 0 || values[place] === null) return "";
    const first = this.status.first[name],
      value = values[place];
    const from =
      at == null && first && first.round !== rounds[place]
        ? `, ${value === first.value ? "unchanged since" : `${value < first.value ? "down" : "up"} from ${number(first.value)} in`} round ${first.round}`
        : "";
    return `${number(value)} in round ${rounds[place]}${from}`;
  }

  say() {
    const { plot } = this,
      data = plot?.data || this.curves.data(),
      rounds = data[0],
      at = plot?.cursor.idx;
    const mean = this.told(data.at(-2), rounds, this.name, at),
      evaluated = this.told(data.at(-1), rounds, GLOBAL + this.name, at);
    const focused = plot?.series[this.focused ?? 0],
      isSite = at != null && this.focused > 0 && this.focused < data.length - 2;
    this.said.replaceChildren(
      [
        mean && `mean ${mean}`,
        evaluated && `${EVALUATED} ${evaluated}`,
        isSite && `${focused.label} ${number(data[this.focused][at])}`,
      ]
        .filter(Boolean)
        .join("; ") || "no value yet",
    );
  }
}

export class Charts {
  constructor() {
    this.charts = [];
    DARK.addEventListener("change", () =>
      this.charts.forEach((each) => each.curves?.loaded && each.draw()),
    );
  }

  async refresh(status, chosen) {
    const names = metricNames(status);
    $("curves-hint").textContent = names.length
      ? `The mean of all sites is thick, each site is thin.${status.evaluation ? " The server's evaluation of versions is dashed." : ""} Point at a line for its site; drag to enlarge, double-click to go back.`
      : 'No site has reported a metric yet: submit(model, metrics={"loss": …}).';
    while (this.charts.length < Math.min(names.length, MOST)) {
      const chart = new Chart(names, names[this.charts.length]);
      this.charts.push(chart);
      $("charts").append(chart.figure);
    }
    for (const chart of this.charts) {
      chart.offer(names);
      await chart.refresh(status, chosen);
    }
  }

  take(event) {
    for (const { curves, name } of this.charts) {
      if (event.summary) curves?.take(event.summary);
      if (event.what === "version evaluated" && !event.fragment && name in event.metrics)
        curves?.evaluated.set(event.round, event.metrics[name]);
    }
  }

  forget() {
    for (const each of this.charts) each.curves = null;
  }

  choose(chosen) {
    for (const each of this.charts) {
      each.chosen = chosen;
      if (each.curves?.loaded) each.draw();
    }
  }
}

// The metrics of sites and of the server's evaluation; those that say whether it learns are first.
export function metricNames(status) {
  const names = [...new Set([...evaluatedNames(status), ...Object.keys(status.first)])]
    .filter((each) => !each.startsWith(GLOBAL))
    .sort();
  const first = ["loss", status.best?.metric.replace(GLOBAL, ""), ...evaluatedNames(status)];
  return [...new Set([...first.filter((each) => names.includes(each)), ...names])];
}

export const evaluatedNames = (status) =>
  Object.keys(status.first)
    .filter((each) => each.startsWith(GLOBAL))
    .map((each) => each.slice(GLOBAL.length));
