"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const root = document.documentElement;
  const drawn = new Map(); // figure key -> Vega's result
  const epochs = new Map(); // panel key -> chosen epoch

  // Tables: columns of values, gzipped, made rows when first needed.
  const rows = new Map();
  async function table(name) {
    if (!rows.has(name)) rows.set(name, unpack(report.tables[name]));
    return rows.get(name);
  }
  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const columns = JSON.parse(await new Response(stream).text());
    const names = Object.keys(columns);
    if (!names.length) return [];
    return columns[names[0]].map((_, at) => Object.fromEntries(names.map((name) => [name, columns[name][at]])));
  }

  // Theme: the system's, until the button is used.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  let chosen = null;
  const theme = () => chosen ?? (system.matches ? "dark" : "light");
  function paint() {
    root.dataset.theme = theme();
    button.setAttribute("aria-pressed", String(theme() === "dark"));
    report.themes[theme()].series.forEach((colour, at) => root.style.setProperty(`--series-${at}`, colour));
    const active = document.querySelector('[role="tabpanel"]:not([hidden])');
    drawn.forEach((result) => result.finalize());
    drawn.clear();
    return draw(active);
  }
  button.addEventListener("click", () => {
    chosen = theme() === "dark" ? "light" : "dark";
    paint();
  });
  system.addEventListener("change", () => chosen ?? paint());

  // Figures.
  const panelOf = (element) => element.closest('[role="tabpanel"]');
  function epochOf(figure, panel) {
    return figure.last ? Math.min(epochs.get(panel.id) ?? figure.last, figure.last) : null;
  }
  function variantOf(figure, panel) {
    const values = [...panel.querySelectorAll("select[data-control]")].map((select) => select.value);
    return figure.variants[values.join("-")] ?? figure.variants[""];
  }
  async function draw(panel) {
    await Promise.all([...panel.querySelectorAll("figure")].map((element) => drawFigure(element, panel)));
    root.dataset.ready = panel.id;
  }
  async function drawFigure(element, panel) {
    const key = element.dataset.figure;
    const figure = report.figures[key];
    const variant = variantOf(figure, panel);
    if (!variant) return leaveOut(element);
    const epoch = epochOf(figure, panel);
    const shown = epoch === null ? "" : `, epoch ${epoch}`;
    element.querySelector("h3").textContent = variant.title + shown;
    const before = drawn.get(key);
    if (before?.variant === variant) {
      if (epoch !== null) await before.view.signal("epoch", epoch).runAsync();
    } else {
      const datasets = {};
      for (const name of variant.data) datasets[name] = await table(name);
      const result = await vegaEmbed(element.querySelector(".plot"), { ...variant.spec, datasets }, {
        actions: false,
        ast: true, // no eval: the page forbids it
        config: report.themes[theme()].config,
        renderer: figure.canvas ? "canvas" : "svg",
        tooltip: { theme: "custom" },
      });
      before?.finalize();
      if (figure.picks) result.view.addEventListener("click", (_, item) => pick(panel, figure.picks, item?.datum));
      result.variant = variant;
      drawn.set(key, result);
      if (epoch !== null) await result.view.signal("epoch", epoch).runAsync();
    }
    element.querySelector(".tools").hidden = false;
    const details = element.querySelector("details");
    if (details.open) await fill(element);
    else details.querySelector(".scroll").replaceChildren();
  }

  function pick(panel, [control, field], datum) {
    const select = panel.querySelector(`select[data-control="${control}"]`);
    if (datum?.[field] === undefined || !select) return;
    select.value = datum[field];
    select.dispatchEvent(new Event("change", { bubbles: true }));
  }

  function leaveOut(element) {
    const key = element.dataset.figure;
    drawn.get(key)?.finalize();
    drawn.delete(key);
    element.querySelector(".plot").textContent = "None of these runs kept this.";
    element.querySelector(".tools").hidden = true;
  }

  // The same rows as text.
  async function textOf(element) {
    const panel = panelOf(element);
    const figure = report.figures[element.dataset.figure];
    const epoch = epochOf(figure, panel);
    let found = await table(variantOf(figure, panel).data[0]);
    for (const [field, allowed] of Object.entries(figure.where)) found = found.filter((row) => allowed.includes(row[field]));
    if (epoch !== null) found = found.filter((row) => row.epoch === epoch);
    if (!figure.pivot) return { columns: figure.columns, rows: found };
    const [down, across, value] = figure.pivot;
    const byRow = new Map();
    const names = [...new Set(found.map((row) => row[across]))];
    for (const row of found) {
      if (!byRow.has(row[down])) byRow.set(row[down], { [down]: row[down] });
      byRow.get(row[down])[row[across]] = row[value];
    }
    const format = figure.columns[0].format;
    return {
      columns: [{ field: down, title: down, format: "" }, ...names.map((name) => ({ field: name, title: String(name), format }))],
      rows: [...byRow.values()],
    };
  }
  function written(value, format) {
    if (value === null || value === undefined) return "-";
    const digits = Number(format.slice(1));
    switch (format[0]) {
      case "g":
        return String(Number(value.toPrecision(digits)));
      case "e":
        return value.toExponential(digits);
      case "f":
        return value.toFixed(digits);
      default:
        return String(value);
    }
  }
  async function fill(element) {
    const { columns, rows: found } = await textOf(element);
    const made = document.createElement("table");
    const head = made.createTHead().insertRow();
    for (const column of columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = column.title;
      if (column.format) cell.className = "number";
      head.append(cell);
    }
    const body = made.createTBody();
    for (const row of found) {
      const line = body.insertRow();
      columns.forEach((column, at) => {
        const cell = document.createElement(at ? "td" : "th");
        if (!at) cell.scope = "row";
        cell.textContent = written(row[column.field], column.format);
        if (column.format) cell.className = "number";
        line.append(cell);
      });
    }
    const place = element.querySelector("details .scroll");
    place.setAttribute("aria-label", `Data table: ${element.querySelector("h3").textContent}`);
    place.replaceChildren(made);
  }

  function offer(name, href) {
    const link = document.createElement("a");
    link.download = name;
    link.href = href;
    link.click();
    say(`${name} saved`);
  }
  const say = (text) => (document.getElementById("status").textContent = text);
  async function save(element, kind) {
    const name = `${element.dataset.figure}.${kind}`;
    if (kind === "csv") {
      const { columns, rows: found } = await textOf(element);
      const quote = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
      const lines = [columns.map((column) => column.title)];
      for (const row of found) lines.push(columns.map((column) => String(row[column.field] ?? "")));
      const text = lines.map((line) => line.map(quote).join(",")).join("\n") + "\n";
      const href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      offer(name, href);
      setTimeout(() => URL.revokeObjectURL(href), 1000);
    } else {
      offer(name, await drawn.get(element.dataset.figure).view.toImageURL(kind, kind === "png" ? 2 : 1));
    }
  }
  for (const element of document.querySelectorAll("figure")) {
    element.querySelector("details").addEventListener("toggle", (event) => event.target.open && fill(element));
    for (const each of element.querySelectorAll("[data-save]")) each.addEventListener("click", () => save(element, each.dataset.save));
  }

  // Controls.
  for (const select of document.querySelectorAll("select[data-control]")) {
    select.addEventListener("change", () => draw(panelOf(select)));
  }
  for (const range of document.querySelectorAll('input[type="range"]')) {
    const panel = panelOf(range);
    const move = (epoch) => {
      range.value = epoch;
      panel.querySelector("output").textContent = epoch;
      epochs.set(panel.id, Number(epoch));
      return draw(panel);
    };
    range.addEventListener("input", () => move(range.value));
    for (const each of panel.querySelectorAll("[data-epoch]")) each.addEventListener("click", () => move(each.dataset.epoch));
  }

  // Tabs: one stop for the Tab key; arrows, Home and End go between them (WAI-ARIA's pattern).
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function open(tab, focus) {
    for (const each of tabs) {
      const active = each === tab;
      each.setAttribute("aria-selected", String(active));
      each.tabIndex = active ? 0 : -1;
      document.getElementById(each.getAttribute("aria-controls")).hidden = !active;
    }
    if (focus) tab.focus();
    const panel = document.getElementById(tab.getAttribute("aria-controls"));
    history.replaceState(null, "", `#show=${panel.id}`);
    return draw(panel);
  }
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => open(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      open(tabs[(to + tabs.length) % tabs.length], true);
    });
  });

  // Settings.
  const differing = document.getElementById("differing");
  function narrow() {
    const same = document.querySelectorAll("#configuration [data-same]");
    for (const row of same) row.hidden = differing.checked;
    document.getElementById("same-count").textContent = differing.checked ? `${same.length} settings are the same in all` : "";
  }
  differing?.addEventListener("change", narrow);
  if (differing) narrow();
  for (const copy of document.querySelectorAll("[data-copy]")) {
    copy.addEventListener("click", async () => {
      const code = copy.parentElement.querySelector("code");
      getSelection().selectAllChildren(code); // what a browser that forbids the clipboard leaves to Ctrl-C
      try {
        await navigator.clipboard.writeText(code.textContent);
        say("Command copied");
      } catch {
        say("Command selected: copy it with Ctrl-C");
      }
    });
  }

  paint();
  const asked = tabs.find((tab) => `#show=${tab.getAttribute("aria-controls")}` === location.hash);
  if (asked) open(asked);
})();
