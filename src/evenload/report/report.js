// Draws each figure when it comes near the screen, and dresses it in the colours of the page (light or dark).
(() => {
  "use strict";
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif';
  // By name, so that a new plotly.js adds no button of its own: its default bar uploads figures to a cloud.
  const CONFIG = {
    responsive: true,
    displaylogo: false,
    showSendToCloud: false,
    plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: "evenload" },
  };
  const drawn = new Set();

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Relayout keys that depend on the theme, for the axes this layout has.
  const theme = (layout) => {
    const update = {
      "font.color": color("--text"),
      "hoverlabel.bgcolor": color("--tip"),
      "hoverlabel.bordercolor": color("--tip-border"),
      "hoverlabel.font.color": color("--tip-text"),
      "modebar.color": color("--muted"),
      "modebar.activecolor": color("--accent"),
    };
    for (const axis of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      update[`${axis}.gridcolor`] = color("--grid");
      update[`${axis}.linecolor`] = color("--rule");
      update[`${axis}.tickcolor`] = color("--rule");
    }
    return update;
  };

  const assign = (target, path, value) => {
    const keys = path.split(".");
    const last = keys.pop();
    for (const key of keys) target = target[key] ??= {};
    target[last] = value;
  };

  const draw = (plot) => {
    if (drawn.has(plot)) return;
    drawn.add(plot);
    const { data, layout } = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
    layout.font = { ...layout.font, family: FONT, size: 12 };
    layout.hoverlabel = { align: "left", font: { family: FONT, size: 13 } };
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", orientation: "h" };
    for (const [path, value] of Object.entries(theme(layout))) assign(layout, path, value);
    Object.assign(plot, { baseTop: layout.margin.t, baseHeight: layout.height });
    Plotly.newPlot(plot, data, layout, CONFIG)
      .then(() => fitLegend(plot))
      .then(() => plot.setAttribute("data-drawn", ""));
  };

  // The layout has room for one row of legend; on a narrow page it wraps, so make the figure higher by the rest.
  const fitLegend = (plot) => {
    const legend = plot.querySelector(".legend");
    const extra = legend ? Math.max(0, Math.ceil(legend.getBoundingClientRect().height) - 28) : 0;
    if (plot.layout.margin.t === plot.baseTop + extra) return undefined;
    plot.style.height = `${plot.baseHeight + extra}px`;
    return Plotly.relayout(plot, { "margin.t": plot.baseTop + extra, height: plot.baseHeight + extra });
  };

  const plots = [...document.querySelectorAll(".plot")];
  const near = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        near.unobserve(entry.target);
        draw(entry.target);
      }
    },
    { rootMargin: "400px" },
  );
  plots.forEach((plot) => near.observe(plot));
  window.addEventListener("beforeprint", () => plots.forEach(draw));
  let settled;
  window.addEventListener("resize", () => {
    clearTimeout(settled);
    settled = setTimeout(() => drawn.forEach(fitLegend), 300);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const plot of drawn) Plotly.relayout(plot, theme(plot.layout));
  });
})();
