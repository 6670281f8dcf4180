// What the pictures of a page share: numbers as people read them; for canvases sharp pixels, the page's colours, axes.
"use strict";
Evenload.chart = (() => {
  const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif';
  // Room for names of lanes, for the last tick label, and for the axis.
  const RIGHT = 14, AXIS = 20;
  const NARROW = 560;
  const left = (width) => (width < NARROW ? 60 : 92);

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // A context in CSS pixels, cleared.
  const context = (canvas, width, height) => {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = FONT;
    ctx.textBaseline = "middle";
    return ctx;
  };

  const scale = ([low, high], width) => {
    const from = left(width);
    const factor = (width - from - RIGHT) / (high - low);
    return {
      at: (value) => from + (value - low) * factor,
      value: (x) => low + (x - from) / factor,
      low, high, factor, left: from, right: width - RIGHT,
    };
  };

  // Ticks at 1, 2 or 5 times a power of the base unit, about one every `spacing` pixels.
  const ticks = (low, high, pixels, spacing = 90) => {
    const rough = ((high - low) * spacing) / Math.max(1, pixels);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? power * 10;
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12); k++) found.push(k * step);
    return { step, values: found };
  };

  // The first whole number in [low, high) for which something holds, from there on; `high` where there is none.
  const firstWhere = (low, high, holds) => {
    while (low < high) {
      const middle = (low + high) >> 1;
      if (holds(middle)) high = middle;
      else low = middle + 1;
    }
    return low;
  };

  const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
  const digits = (value) => {
    const size = Math.abs(Number(value.toPrecision(3)));
    return value.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0);
  };
  const seconds = (value) => {
    if (value === 0) return "0 s";
    const [unit, name] = UNITS.find(([u]) => Math.abs(Number(value.toPrecision(3))) >= u) ?? UNITS[3];
    return `${digits(value / unit)} ${name}`;
  };
  // Enough digits to tell two ticks apart.
  const tickSeconds = (value, step) => {
    if (value === 0) return "0";
    const [unit, name] = UNITS.find(([u]) => Math.abs(value) >= u * 0.9999) ?? UNITS[3];
    const places = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
    return `${(value / unit).toFixed(Math.min(6, places))} ${name}`;
  };
  const bytes = (value) => {
    let power = 0;
    while (Math.round(Math.abs(value / 1024 ** power)) >= 1024 && power < 5) power++;
    return `${power ? digits(value / 1024 ** power) : value} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
  };
  // The sum turns -0 into 0.
  const count = (value) => (Math.round(value) + 0).toLocaleString("en-US");
  const percent = (value) => `${(100 * value).toFixed(1)} %`;

  // Vertical grid lines and their labels under the plot.
  const axis = (ctx, x, top, bottom, label) => {
    const { step, values } = ticks(x.low, x.high, x.right - x.left);
    ctx.strokeStyle = color("--grid");
    ctx.fillStyle = color("--muted");
    ctx.textAlign = "center";
    ctx.lineWidth = 1;
    ctx.beginPath();
    for (const value of values) {
      const at = Math.round(x.at(value)) + 0.5;
      ctx.moveTo(at, top);
      ctx.lineTo(at, bottom);
      ctx.fillText(label(value, step), at, bottom + AXIS / 2 + 1);
    }
    ctx.stroke();
  };

  const clip = (ctx, x, top, bottom) => {
    ctx.save();
    ctx.beginPath();
    ctx.rect(x.left, top, x.right - x.left, bottom - top);
    ctx.clip();
  };

  // Through the given [red, green, blue] stops, 0 to 1.
  const blend = (stops, position) => {
    const at = Math.min(Math.max(position, 0), 1) * (stops.length - 1);
    const i = Math.min(Math.floor(at), stops.length - 2);
    return stops[i].map((low, k) => Math.round(low + (stops[i + 1][k] - low) * (at - i)));
  };
  const rgb = (parts) => `rgb(${parts.join(",")})`;

  return {
    AXIS, NARROW, color, context, scale, ticks, firstWhere, seconds, tickSeconds, bytes, count, percent, axis, clip, blend, rgb,
  };
})();
