// What pointing at a picture shows, arrow keys over curves, and a page that prints as it stands.
"use strict";
(() => {
  const { seconds, count, firstWhere } = Evenload.chart;
  const { show, hide } = Evenload.tip;
  const FORMATS = {
    s: seconds,
    "%": (value) => `${(100 * value).toFixed(2)} %`,
    count: (value) => count(value),
    "": (value) => value.toPrecision(6),
  };

  // Marks with words of their own.
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest?.("[data-tip]");
    if (mark) show(mark.dataset.tip.split("\n"), event);
    else if (!event.target.closest?.("[data-curves], .stage")) hide();
  });
  document.addEventListener("pointerdown", (event) => {
    const mark = event.target.closest?.("[data-tip]");
    if (mark) show(mark.dataset.tip.split("\n"), event);
  });

  // Curves: all values at the step that is nearest.
  for (const plot of document.querySelectorAll("[data-curves]")) {
    const { xName, x, at, kind, series } = JSON.parse(plot.dataset.curves);
    const said = document.createElement("div");
    said.className = "said";
    said.setAttribute("role", "status");
    plot.after(said);
    // Like any line of the picture: made anew it would need the address of a namespace.
    const cross = plot.querySelector("line").cloneNode();
    cross.setAttribute("class", "cross");
    cross.setAttribute("y1", 0);
    cross.setAttribute("y2", plot.getAttribute("height"));
    cross.setAttribute("visibility", "hidden");
    plot.append(cross);
    let chosen = -1;
    const linesAt = (i) => [
      [xName === "step" ? `step ${x[i]}` : `${xName} ${count(x[i])} ${document.documentElement.dataset.unit}`, ""],
      ...series
        .filter(({ values }) => values[i] !== null)
        .map(({ name, values }) => `${series.length > 1 ? `${name}: ` : ""}${FORMATS[kind](values[i])}`),
    ];
    const choose = (i, place) => {
      chosen = i;
      cross.setAttribute("x1", `${100 * at[i]}%`);
      cross.setAttribute("x2", `${100 * at[i]}%`);
      cross.setAttribute("visibility", "visible");
      show(linesAt(i), place);
    };
    const rest = () => {
      cross.setAttribute("visibility", "hidden");
      hide();
    };
    const nearest = (share) => {
      const high = firstWhere(0, at.length - 1, (i) => at[i] >= share);
      const low = Math.max(0, high - 1);
      return share - at[low] < at[high] - share ? low : high;
    };
    const follow = (event) => {
      if (!x.length || event.target.closest("[data-tip]")) return;
      const box = plot.getBoundingClientRect();
      choose(nearest((event.clientX - box.left) / box.width), event);
    };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    // The step view opens the step that was clicked, where the page has it.
    plot.addEventListener("click", (event) => {
      if (xName !== "step" || event.target.closest("[data-tip]") || chosen < 0) return;
      document.dispatchEvent(new CustomEvent("evenload-step", { detail: x[chosen] }));
    });
    plot.addEventListener("pointerleave", rest);
    plot.addEventListener("blur", rest);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Enter") plot.dispatchEvent(new MouseEvent("click"));
      const next = {
        ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: x.length - 1,
        PageUp: chosen - Math.ceil(x.length / 10), PageDown: chosen + Math.ceil(x.length / 10),
      }[event.key];
      if (next === undefined || !x.length || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const i = Math.min(Math.max(next, 0), x.length - 1);
      const box = plot.getBoundingClientRect();
      choose(i, { clientX: box.left + at[i] * box.width, clientY: box.top + 20 });
      said.textContent = linesAt(i).map((line) => (Array.isArray(line) ? line.join("") : line)).join(", ");
    });
  }

  // On paper everything is unfolded, on white.
  const folded = [];
  window.addEventListener("beforeprint", () => {
    document.documentElement.dataset.print = "";
    for (const one of document.querySelectorAll("details:not([open]):not(.numbers)")) {
      one.open = true;
      folded.push(one);
    }
  });
  window.addEventListener("afterprint", () => {
    delete document.documentElement.dataset.print;
    for (const one of folded.splice(0)) one.open = false;
  });
})();
