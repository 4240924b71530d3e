// Elements and texts. Whatever comes from the server becomes text, never markup.

export const $ = (id) => document.getElementById(id);

export function el(tag, about = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(about)) {
    if (key === "class") node.className = value;
    else if (key in node && key !== "list") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((each) => each !== null && each !== undefined && each !== ""));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function size(bytes) {
  for (const [limit, unit] of [
    [1e9, "GB"],
    [1e6, "MB"],
    [1e3, "kB"],
  ])
    if (bytes >= limit) return `${(bytes / limit).toFixed(1)} ${unit}`;
  return `${Math.round(bytes)} B`;
}

export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  return minutes < 120
    ? `${minutes} min ${Math.round(seconds) % 60} s`
    : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const number = (value) => (value === null || value === undefined ? "–" : String(+value.toPrecision(4)));

export function median(values) {
  const sorted = values.filter((each) => each > 0).sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length ? (sorted[half] + sorted[(sorted.length - 1) >> 1]) / 2 : 0;
}

export function facts(list, pairs) {
  list.replaceChildren(
    ...pairs
      .filter(([, value]) => value !== "")
      .map(([key, value, id]) => el("div", {}, el("dt", {}, key), el("dd", id ? { id } : {}, value))),
  );
}

export function fill(table, columns, rows) {
  // columns: [title, class]; rows: {cells, class, id}; a cell is a text, an element, or [text, class]
  const titles = columns.map(([title]) => title);
  if ([...(table.tHead.rows[0]?.cells || [])].map((each) => each.textContent).join("\n") !== titles.join("\n"))
    table.tHead.replaceChildren(
      el("tr", {}, ...columns.map(([title, kind]) => el("th", { class: kind || "", scope: "col" }, title))),
    );
  table.tBodies[0].replaceChildren(
    ...rows.map((row) =>
      el(
        "tr",
        { class: row.class || "" },
        ...row.cells.map((cell, place) => {
          const [content, kind] = Array.isArray(cell) ? cell : [cell, ""];
          return el(
            place ? "td" : "th",
            { class: `${columns[place][1] || ""} ${kind}`, ...(place ? {} : { scope: "row" }) },
            content,
          );
        }),
      ),
    ),
  );
}
