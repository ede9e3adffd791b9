document.querySelectorAll("th button").forEach(button => button.addEventListener("click", () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending", column = head.cellIndex;
  const key = row => { const cell = row.cells[column];
    return "key" in cell.dataset ? Number(cell.dataset.key) : cell.textContent; };
  const order = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
  [...body.rows].sort((a, b) => (up ? 1 : -1) * order(key(a), key(b))).forEach(row => body.append(row));
  head.parentElement.querySelectorAll("th").forEach(each => each.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
}));
