// Draws memory over a step: a line a rank, or the fullest rank by kind; the limit dashed.
"use strict";
Evenload.stepMemory = (() => {
  const { AXIS, color, context, scale, ticks, firstWhere, tickSeconds, bytes, axis, clip, blend, rgb } = Evenload.chart;
  const MEMORY_PX = 132;
  const RANK_STOPS = [[47, 127, 208], [140, 100, 170], [224, 140, 40]];

  // Index of the sample that holds at a time; -1 before the first one.
  const sampleAt = (timeline, lane, at) => {
    const later = firstWhere(lane.firstSample, lane.lastSample, (sample) => timeline.time[sample] > at);
    return later > lane.firstSample ? later - 1 : -1;
  };

  // Bytes a lane holds at a time; undefined before its first sample.
  const held = (timeline, lane, at) => {
    const sample = sampleAt(timeline, lane, at);
    return sample < 0 ? undefined : timeline.bytes[sample];
  };

  // [name, bytes] of what a lane holds at a time, most first.
  const kindsHeld = (timeline, lane, at) => {
    const sample = sampleAt(timeline, lane, at);
    if (sample < 0) return [];
    const found = timeline.kinds.map(({ name, bytes: column }) => [name, column[sample]]);
    return found.filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
  };

  const fullest = (panel) =>
    panel.placed.rows.reduce((best, { lane }) => (best && best.peakBytes >= lane.peakBytes ? best : lane), null);

  // The most a lane holds of what runs count, too: all but buffers of the running pack.
  const countedPeak = (timeline, lane, memory) => {
    const columns = timeline.kinds.filter(({ name }) => memory[name].counted).map(({ bytes: column }) => column);
    let most = 0;
    for (let sample = lane.firstSample; sample < lane.lastSample; sample++) {
      most = Math.max(most, columns.reduce((sum, column) => sum + column[sample], 0));
    }
    return most;
  };

  // A limit far above everything held would squeeze the lines to the ground; then only its number is shown.
  const FAR = 4;
  const memoryScale = (panel, limitBytes) => {
    const peak = panel.placed.rows.reduce((most, { lane }) => Math.max(most, lane.peakBytes), 0);
    const isFar = Boolean(limitBytes) && limitBytes > FAR * peak;
    const most = Math.max(peak, isFar ? 0 : (limitBytes ?? 0)) * 1.06 || 1;
    return { most, isFar, at: (value) => MEMORY_PX - 4 - (value / most) * (MEMORY_PX - 12) };
  };

  const laneColor = (panel, lane) =>
    rgb(blend(RANK_STOPS, panel.mostRank ? lane.rank / panel.mostRank : 0));

  // `byKind`: styles of the kinds, for the fullest rank as a stack; null for all ranks as lines.
  const draw = (canvas, panel, view, width, limitBytes, byKind) => {
    const { timeline } = panel;
    const ctx = context(canvas, width, MEMORY_PX + AXIS);
    const x = scale(view, width);
    const y = memoryScale(panel, limitBytes);
    axis(ctx, x, 0, MEMORY_PX, tickSeconds);
    const gib = 2 ** 30;
    const unit = y.most >= gib ? gib : 2 ** 20;
    const found = ticks(0, y.most / unit, MEMORY_PX, 30);
    ctx.strokeStyle = color("--grid");
    ctx.fillStyle = color("--muted");
    ctx.textAlign = "right";
    ctx.beginPath();
    for (const value of found.values) {
      const at = Math.round(y.at(value * unit)) + 0.5;
      ctx.moveTo(x.left, at);
      ctx.lineTo(x.right, at);
      const places = Math.max(0, Math.ceil(-Math.log10(found.step)));
      ctx.fillText(`${value.toFixed(places)} ${unit === gib ? "GiB" : "MiB"}`, x.left - 8, at);
    }
    ctx.stroke();
    clip(ctx, x, 0, MEMORY_PX);
    if (byKind && timeline.kinds.length) stack(ctx, timeline, fullest(panel), x, y, byKind);
    else {
      ctx.lineWidth = panel.placed.rows.length > 32 ? 0.8 : 1.5;
      for (const { lane } of panel.placed.rows) {
        ctx.strokeStyle = laneColor(panel, lane);
        ctx.beginPath();
        trace(ctx, timeline, lane, x, y);
        ctx.stroke();
      }
    }
    if (limitBytes) {
      const at = y.isFar ? 4 : y.at(limitBytes);
      ctx.strokeStyle = ctx.fillStyle = color("--limit");
      ctx.lineWidth = 1.6;
      ctx.setLineDash([6, 4]);
      ctx.beginPath();
      ctx.moveTo(x.left, at);
      ctx.lineTo(y.isFar ? x.left : x.right, at);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.textAlign = "right";
      ctx.fillText(`limit ${bytes(limitBytes)}${y.isFar ? " (far above)" : ""}`, x.right - 6, at + 9);
    }
    ctx.restore();
  };

  // One column of stacked kinds a pixel; of many samples in a pixel the one that holds most.
  const stack = (ctx, timeline, lane, x, y, byKind) => {
    let sample = sampleAt(timeline, lane, x.low);
    const right = Math.min(x.right, x.at(timeline.stepTimeS));
    for (let px = Math.floor(x.left); px < right; px++) {
      let most = sample;
      while (sample + 1 < lane.lastSample && timeline.time[Math.max(sample, lane.firstSample - 1) + 1] < x.value(px + 1)) {
        sample = Math.max(sample, lane.firstSample - 1) + 1;
        if (most < 0 || timeline.bytes[sample] > timeline.bytes[most]) most = sample;
      }
      if (most < 0) continue;
      let below = 0;
      for (const { name, bytes: column } of timeline.kinds) {
        if (!column[most]) continue;
        ctx.fillStyle = byKind[name].color;
        ctx.fillRect(px, y.at(below + column[most]), 1, y.at(below) - y.at(below + column[most]));
        below += column[most];
      }
    }
  };

  // A staircase; many samples in one pixel become the vertical line from their least to their most.
  const trace = (ctx, timeline, lane, x, y) => {
    if (lane.firstSample === lane.lastSample) return;
    let column = null;
    let low = 0;
    let high = 0;
    let last = y.at(held(timeline, lane, x.low) ?? timeline.bytes[lane.firstSample]);
    ctx.moveTo(x.left, last);
    for (let i = lane.firstSample; i < lane.lastSample; i++) {
      if (timeline.time[i] <= x.low) continue;
      if (timeline.time[i] > x.high) break;
      const at = Math.round(x.at(timeline.time[i]) * 2) / 2;
      const level = y.at(timeline.bytes[i]);
      if (at !== column) {
        if (column !== null) flush(ctx, column, low, high, last);
        ctx.lineTo(at, last);
        column = at;
        low = high = last;
      }
      low = Math.min(low, level);
      high = Math.max(high, level);
      last = level;
    }
    if (column !== null) flush(ctx, column, low, high, last);
    ctx.lineTo(Math.min(x.right, x.at(timeline.stepTimeS)), last);
  };
  const flush = (ctx, column, low, high, last) => {
    ctx.lineTo(column, low);
    ctx.lineTo(column, high);
    ctx.lineTo(column, last);
  };

  // The line nearest to a point of the memory canvas; by kind there is one rank only.
  const memoryAt = (panel, view, width, limitBytes, px, py, byKind) => {
    const x = scale(view, width);
    if (px < x.left || px > x.right || py > MEMORY_PX) return null;
    const y = memoryScale(panel, limitBytes);
    let best = null;
    const only = byKind && panel.timeline.kinds.length ? fullest(panel) : null;
    for (const { lane } of panel.placed.rows) {
      if (only && lane !== only) continue;
      const value = held(panel.timeline, lane, x.value(px));
      if (value === undefined) continue;
      const distance = Math.abs(y.at(value) - py);
      if (best === null || distance < best.distance) best = { lane, bytes: value, at: x.value(px), distance };
    }
    return best;
  };

  const gradient = `linear-gradient(90deg,${RANK_STOPS.map(rgb).join(",")})`;

  return { MEMORY_PX, gradient, draw, held, kindsHeld, fullest, countedPeak, memoryAt };
})();
