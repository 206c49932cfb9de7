"use strict";
(() => {
  const tip = document.getElementById("tip");

  // Titles become a tooltip that comes at once, and for fingers too.
  for (const mark of document.querySelectorAll(".mark")) {
    const title = mark.querySelector("title");
    if (title) {
      mark.dataset.tip = title.textContent.replace("; ", "\n");
      mark.setAttribute("aria-label", title.textContent);
      title.remove();
    }
  }

  const same = (element) =>
    document.querySelectorAll(`[data-point="${element.dataset.point}"]:is(.mark, tr)`);

  function show(element, x, y) {
    clear();
    for (const other of same(element)) {
      if (other.matches("tr") && other.dataset.part !== element.dataset.part) continue;
      other.classList.add("focus");
      other.closest("figure")?.classList.add("has-focus");
    }
    if (!element.dataset.tip) return;
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
    const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  }

  function clear() {
    tip.hidden = true;
    for (const element of document.querySelectorAll(".focus")) element.classList.remove("focus");
    for (const element of document.querySelectorAll(".has-focus")) element.classList.remove("has-focus");
  }

  const target = (event) => event.target.closest?.(".mark, tr[data-point]");
  document.addEventListener("pointerover", (event) => {
    const element = target(event);
    if (element) show(element, event.clientX, event.clientY);
    else clear();
  });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  // Tables sort by their headings. Cells without a number go last, in either direction.
  function key(row, index) {
    const cell = row.cells[index];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  }

  function compare(a, b, direction) {
    const isText = [a, b].map((value) => typeof value === "string");
    if (isText[0] && isText[1]) return direction * a.localeCompare(b, undefined, { numeric: true });
    if (isText[0] !== isText[1]) return isText[0] ? 1 : -1;
    return direction * (a - b);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of headings) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [key(row, index), row]);
        rows.sort((a, b) => compare(a[0], b[0], direction));
        body.append(...rows.map((pair) => pair[1]));
      });
    });
  }
})();
