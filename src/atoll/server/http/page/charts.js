// Curves of a metric over the rounds: the mean thick, sites thin, the best marked.

import { $, el, number } from "./dom.js";
import { getJSON } from "./server.js";

const POINTS = 300,
  MOST = 2; // rounds a curve, charts
const WHOLE = [1, 2, 5].flatMap((each) => [0, 1, 2, 3, 4, 5].map((power) => each * 10 ** power)).sort((a, b) => a - b);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Curves {
  constructor(value) {
    Object.assign(this, { value, rounds: [], versions: [], mean: [], sites: new Map() });
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

  // The values of a site, as many as there are rounds; if `value` is given, it is the last one.
  filled(site, value) {
    const known = this.sites.get(site) || [];
    while (known.length < this.rounds.length) known.push(null);
    if (value !== undefined) known[known.length - 1] = value;
    return known;
  }
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
      this.refresh(this.best, this.chosen);
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

  async refresh(best, chosen) {
    Object.assign(this, { best, chosen });
    if (!this.curves || this.curves.rounds.length > 3 * POINTS) {
      const curves = (this.curves = new Curves(`metrics.${this.name}`));
      await curves.load();
      if (curves !== this.curves) return; // another metric was chosen meanwhile
    }
    if (this.curves.loaded) this.draw();
  }

  draw() {
    const { rounds, mean, sites } = this.curves;
    const names = [...sites.keys()],
      few = names.length <= 10;
    const data = [rounds, ...sites.values(), mean]; // the mean is drawn last, over the sites
    const look = names.join("\n") + this.chosen + matchMedia("(prefers-color-scheme: dark)").matches;
    this.mark = this.marked();
    if (this.plot && look === this.look) this.plot.setData(data);
    else {
      this.plot?.destroy();
      this.look = look;
      const axis = {
        stroke: css("--soft"),
        grid: { stroke: css("--line"), width: 1 },
        ticks: { stroke: css("--line") },
      };
      this.plot = new uPlot(
        {
          width: this.place.clientWidth || 400,
          height: 240,
          legend: { show: false },
          scales: { x: { time: false } },
          axes: [
            { ...axis, space: 60, size: 34, incrs: WHOLE },
            { ...axis, size: 58 },
          ],
          cursor: { focus: { prox: 24 }, drag: { x: true, y: false } },
          focus: { alpha: 0.25 },
          series: [
            {},
            ...names.map((label, place) => ({
              label,
              width: label === this.chosen ? 2.5 : 1,
              spanGaps: true,
              points: { show: rounds.length < 3 },
              stroke:
                label === this.chosen
                  ? css("--link")
                  : few
                    ? `hsl(${(place * 137 + 20) % 360} 55% 55%)`
                    : css("--soft") + "66",
            })),
            { label: "mean", stroke: css("--global"), width: 3, spanGaps: true, points: { show: rounds.length < 3 } },
          ],
          hooks: {
            draw: [(plot) => this.drawMark(plot)],
            setSeries: [(_, index, { focus }) => this.say((this.focused = focus ? index : 0))],
            setCursor: [() => this.say()],
          },
        },
        data,
        this.place,
      );
      this.plot.root.querySelector("canvas").setAttribute("aria-hidden", "true");
    }
    this.say();
    this.place.ariaLabel = `${this.name} over ${rounds.length} rounds: ${this.said.textContent}`;
  }

  marked() {
    const { rounds, mean } = this.curves,
      best = this.best;
    if (best?.metric === this.name && best.value !== null)
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

  say() {
    const { plot } = this,
      { mean, rounds } = this.curves;
    const place = plot?.cursor.idx,
      at = place ?? mean.findLastIndex((each) => each !== null);
    if (at < 0) return this.said.replaceChildren("no value yet");
    const near = place != null && plot.series[this.focused ?? 0];
    const site =
      near?.label && near.label !== "mean" ? `; ${near.label} ${number(plot.data[this.focused][place])}` : "";
    const first = mean.find((each) => each !== null);
    const from =
      place == null && at > 0 && first !== mean[at]
        ? `, ${mean[at] < first ? "down" : "up"} from ${number(first)} in round ${rounds[0]}`
        : "";
    this.said.replaceChildren(`mean ${number(mean[at])} in round ${rounds[at]}${from}${site}`);
  }
}

export class Charts {
  constructor() {
    this.charts = [];
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      this.charts.forEach((each) => each.curves?.loaded && each.draw()),
    );
  }

  async refresh(status, chosen) {
    const names = metricNames(status);
    $("curves-hint").textContent = names.length
      ? "The mean of all sites is thick, each site is thin. Point at a line for its site; drag to enlarge, double-click to go back."
      : 'No site has reported a metric yet: submit(model, metrics={"loss": …}).';
    while (this.charts.length < Math.min(names.length, MOST)) {
      const chart = new Chart(names, names[this.charts.length]);
      this.charts.push(chart);
      $("charts").append(chart.figure);
    }
    for (const chart of this.charts) {
      chart.offer(names);
      await chart.refresh(status.best, chosen);
    }
  }

  take(summary) {
    for (const { curves } of this.charts) curves?.take(summary);
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

// The metrics of the last rounds; those that say whether it learns are first.
export function metricNames(status) {
  const names = new Set(status.history.flatMap((each) => Object.keys(each.metrics)));
  const first = ["loss", status.best?.metric].filter((each) => names.has(each));
  return [...new Set([...first, ...[...names].sort()])];
}
