"use strict";
// Sorting, filtering, a card behind every number, and the data to take away. The page reads without any of it.
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const $ = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  const data = JSON.parse($("embedded").textContent);
  const fields = data.cells.fields;
  const cells = data.cells.values.map((values) => Object.fromEntries(fields.map((f, i) => [f, values[i]])));

  const table = $("cells");
  const body = table.tBodies[0];
  const lines = all("tr", body);
  const place = (line) => Number(line.id.slice(1)); // which cell a line shows
  const heads = all("thead th", table);
  const rank = ["FASTER", "SLOWER", "SAME", "UNCLEAR", "REFERENCE", "UNSUPPORTED", "MISSING", "INVALID"];

  // ---- sorting: by the exact values of the data, blanks last in both directions, ties in the grid's order
  function key(line, name) {
    const value = cells[place(line)][name];
    return name === "verdict" ? rank.indexOf(value) : name === "reason" && !value ? null : value;
  }
  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }
  function sort(head) {
    const name = head.querySelector("button").dataset.key;
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((h) => h.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const keyed = lines.map((line) => [key(line, name), line]);
    keyed.sort(([a, x], [b, y]) => {
      if (a === null || b === null) return (a === null) - (b === null) || place(x) - place(y);
      return (down ? -1 : 1) * compare(a, b) || place(x) - place(y);
    });
    body.append(...keyed.map(([, line]) => line));
  }
  heads.forEach((head) => head.querySelector("button").addEventListener("click", () => sort(head)));

  // ---- filtering
  const find = $("find"), library = $("library"), shown = $("shown");
  const chips = all("input[name=verdict]");
  const libraries = data.libraries;
  function filter() {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdicts = new Set(chips.filter((c) => c.checked).map((c) => c.value));
    let count = 0;
    for (const line of lines) {
      const cell = cells[place(line)];
      const text = [cell.grid, cell.row, cell.column, cell.verdict, cell.code, cell.reason].join(" ").toLowerCase();
      line.hidden = !verdicts.has(cell.verdict) || !words.every((w) => text.includes(w)) ||
        (library.value !== "" && libraries[cell.column] !== library.value);
      count += !line.hidden;
    }
    shown.textContent = `${count} of ${lines.length}`;
  }
  [find, library, ...chips].forEach((control) => control.addEventListener("input", filter));

  // ---- the card: what the table says about one cell, beside the mark or number that stands for it
  const card = $("card");
  let shownFor = null;
  const labels = heads.map((h) => h.textContent.trim());
  function element(name, text) {
    const made = document.createElement(name);
    made.textContent = text;
    return made;
  }
  function reproduce(cell) {
    const word = (s) => (/^[\w.\/-]+$/.test(s) ? s : `'${s.replaceAll("'", "'\\''")}'`);
    return `tapgrid run ${word(cell.grid)} --rows ${word(cell.row)} --columns ${word(cell.column)}`;
  }
  function show(target) {
    const line = $(`c${target.dataset.i}`);
    if (!line) return;
    const cell = cells[target.dataset.i];
    const list = document.createElement("dl");
    [...line.cells].forEach((td, i) => {
      if (["grid", "row", "column"].includes(labels[i]) || !td.textContent.trim()) return;
      list.append(element("dt", labels[i]), element("dd", td.textContent.trim()));
    });
    if (cell.rounds_needed && cell.verdict === "UNCLEAR") list.append(element("dt", "rounds to settle"), element("dd", String(cell.rounds_needed)));
    list.append(element("dt", "again"), element("dd", reproduce(cell)));
    card.replaceChildren(element("h4", `${cell.row} · ${cell.column}`), list);
    card.hidden = false;
    shownFor = target;
    stand();
  }
  function stand() {
    const at = shownFor.getBoundingClientRect(), size = card.getBoundingClientRect();
    const below = at.bottom + size.height + 12 < innerHeight;
    card.style.left = `${Math.max(8, Math.min(at.left + 24, innerWidth - size.width - 12))}px`;
    card.style.top = `${Math.max(8, below ? at.bottom + 6 : at.top - size.height - 6)}px`;
  }
  const hide = () => { card.hidden = true; shownFor = null; };
  for (const area of all("[data-rove]")) {
    // A native tooltip would lie over the card; what it said is in the card, and still said aloud.
    all("[title]", area).forEach((e) => {
      e.setAttribute("aria-description", e.title);
      e.removeAttribute("title");
    });
    area.addEventListener("mouseover", (e) => { const t = e.target.closest("[data-i]"); if (t) show(t); });
    area.addEventListener("mouseleave", hide);
    area.addEventListener("focusin", (e) => { const t = e.target.closest("[data-i]"); if (t) show(t); });
    area.addEventListener("focusout", hide);
    // One stop of the Tab key an area; arrows move inside it.
    const links = all("a[data-i]", area);
    links.forEach((link, i) => { link.tabIndex = i ? -1 : 0; });
    const across = Number(area.dataset.rove);
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across };
    area.addEventListener("keydown", (e) => {
      const next = links[links.indexOf(document.activeElement) + moves[e.key]];
      if (!next) return;
      e.preventDefault();
      document.activeElement.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }
  document.addEventListener("keydown", (e) => { if (e.key === "Escape") hide(); });
  addEventListener("scroll", () => { if (shownFor) stand(); }, { passive: true });
  // A cell that the filter hides cannot be jumped to: show it again.
  addEventListener("hashchange", () => {
    const line = lines.find((l) => `#${l.id}` === location.hash);
    if (line) { line.hidden = false; hide(); }
  });

  // ---- taking it away
  const visible = () => all("tr", body).filter((line) => !line.hidden);
  const oneLine = (s) => s.replace(/\s+/g, " ").trim();
  function markdown() {
    const row = (texts) => `| ${texts.map((t) => oneLine(t).replace(/([\\`*_{}[\]<>|~#&!])/g, "\\$1")).join(" | ")} |`;
    return [row(labels), `|${labels.map(() => "---").join("|")}|`, ...visible().map((l) => row([...l.cells].map((c) => c.textContent)))].join("\n");
  }
  function csv() {
    const flat = fields.filter((f) => !f.startsWith("process_"));
    const quote = (v) => {
      if (v === null || typeof v === "number" || typeof v === "boolean") return v === null ? "" : String(v);
      const text = /^[=+\-@\t\r]/.test(v) ? `'${v}` : String(v); // a spreadsheet must not run a name as a formula
      return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    return [flat.join(","), ...visible().map((l) => flat.map((f) => quote(cells[place(l)][f])).join(","))].join("\r\n") + "\r\n";
  }
  async function copy(text, button) {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      button.focus();
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = before; }, 1200);
  }
  function download() {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify({ ...data, cells }, null, 1)], { type: "application/json" }));
    link.download = "tapgrid-report.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  const actions = { markdown: (b) => copy(markdown(), b), csv: (b) => copy(csv(), b), json: () => download() };
  all("[data-do]").forEach((b) => b.addEventListener("click", () => actions[b.dataset.do](b)));

  // ---- paper has no folds
  let folded = [];
  addEventListener("beforeprint", () => { folded = all("details:not([open])"); folded.forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => folded.forEach((d) => { d.open = false; }));
})();
