"use strict";
(() => {
  const $ = (id) => document.getElementById(id);

  // Sorting: by the first number of a cell where there is one, else by its text; empty cells last.
  const key = (text) => {
    const number = parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [key(row.cells[column].textContent), row]);
      const empty = (value) => value === "" || value === "-";
      rows.sort(([a], [b]) => {
        if (empty(a) || empty(b)) return empty(a) - empty(b);
        const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
        return up ? order : -order;
      });
      body.append(...rows.map(([, row]) => row));
    }));
  }

  const filter = $("filter");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of $("rows").tBodies[0].rows) {
      const cells = [...row.cells].map((cell) => cell.textContent.toLowerCase());
      row.hidden = !words.every((word) => cells.some((cell) => cell.includes(word)));
      shown += !row.hidden;
    }
    $("count").textContent = words.length ? `${shown} rows` : "";
  });

  const element = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
    return made;
  };
  const words = (value) => {
    if (value === null || value === undefined) return "-";
    if (Array.isArray(value)) return value.map(words).join(", ") || "none";
    return typeof value === "object" ? Object.entries(value).map(([n, v]) => `${n} ${words(v)}`).join(", ") : String(value);
  };
  const table = (title, heads, rows) => {
    const made = element("table");
    made.append(element("caption", title));
    const head = made.createTHead().insertRow();
    heads.forEach((name) => head.append(element("th", name, { scope: "col" })));
    const body = made.createTBody();
    for (const [label, ...cells] of rows) {
      const row = body.insertRow();
      row.append(element("th", label, { scope: "row" }));
      for (const [value, share, kind] of cells) {
        const cell = element("td", words(value), share === undefined ? { class: "text" } : {});
        if (share > 0) cell.append(element("span", undefined, { class: `bar ${kind || ""}`, style: `width:${Math.min(share, 1) * 100}%` }));
        row.append(cell);
      }
    }
    return made;
  };

  const show = (data, i) => {
    const box = element("div", undefined, { class: "tables" });
    const facts = Object.keys(data.columns).filter((name) => data.columns[name][i] !== null)
      .map((name) => [name, [data.columns[name][i]]]);
    box.append(table("fields", ["field", "value"], facts));
    if (data.columns.jaccard_tied[i] !== null) {
      const error = (v) => (v > 0 ? (Math.log10(v) + 6) / 6 : 0);
      box.append(table("stage ladder: relative error", ["stage", "format", "kernel"], data.stage_names.map((name, s) =>
        [name, [data.format[s][i], error(data.format[s][i])], [data.kernel[s][i], error(data.kernel[s][i]), "kernel"]])));
      box.append(table("survival by rank", ["rank / k", "share selected"], data.survival_bins.map(([lo, hi], b) =>
        [`${lo} to ${hi}`, [data.survival[b][i], data.survival[b][i]]])));
      const seen = data.visible_bins.map((bin, b) => [bin, data.overlap[b][i]]).filter(([, v]) => v !== null);
      box.append(table("overlap against length", ["tokens", "Jaccard, tied"], seen.map(([[lo, hi], value]) =>
        [`${4 * lo} to ${4 * hi}`, [value, value]])));
      const counts = data.margins.map((column) => column[i]);
      const most = Math.max(1, ...counts);
      const names = data.margin_edges.map((edge, b) => b + 1 < data.margin_edges.length ? `${edge} to ${data.margin_edges[b + 1]}` : `from ${edge}`);
      box.append(table("margins at the k-th place", ["margin", "rows"], [...names, "no noise"].map((name, b) => [name, [counts[b], counts[b] / most]])));
    }
    $("case").replaceChildren(box);
  };

  const PICKS = ["layer", "precision", "theta_setting", "length"];
  const start = (data) => {
    const values = Object.fromEntries(PICKS.map((name) => [name, [...new Set(data.columns[name])]]));
    const index = new Map(data.columns.layer.map((_, i) => [PICKS.map((name) => data.columns[name][i]).join("\n"), i]));
    const pick = () => {
      const found = index.get(PICKS.map((name) => $(`pick-${name}`).value).join("\n"));
      if (found === undefined) $("case").replaceChildren(element("p", "no such case in this report"));
      else show(data, found);
    };
    for (const name of PICKS) {
      $(`pick-${name}`).append(...values[name].map((value) => element("option", value, { value })));
      $(`pick-${name}`).addEventListener("change", pick);
    }
    for (const part of document.querySelectorAll("details.part")) {
      const heat = part.querySelector("table.heat");
      heat.addEventListener("click", (event) => {
        const cell = event.target.closest("td");
        if (!cell) return;
        $("pick-layer").value = cell.parentElement.cells[0].textContent;
        $("pick-precision").value = heat.tHead.rows[0].cells[cell.cellIndex].textContent;
        $("pick-theta_setting").value = part.dataset.theta;
        $("pick-length").value = part.dataset.length;
        pick();
        $("one").scrollIntoView({ behavior: "smooth" });
      });
    }
    if (data.columns.layer.length) {
      PICKS.forEach((name) => { $(`pick-${name}`).value = data.columns[name][data.start]; });
      pick();
    }
  };

  const bytes = Uint8Array.from(atob($("data").textContent), (character) => character.charCodeAt(0));
  if (typeof DecompressionStream === "undefined") {
    $("case").textContent = "This browser is too old to unfold single cases; they are in the JSON document as well.";
  } else {
    new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json().then(start);
  }
})();
