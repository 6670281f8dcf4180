// Draws a step: one row a pipeline rank, one bar a task, true widths at any zoom; and the memory of each rank below.
"use strict";
Evenload.stepTimeline = (() => {
  const { AXIS, color, context, scale, ticks, tickSeconds, bytes, axis, clip, blend, rgb } = Evenload.chart;
  const MEMORY_PX = 132;
  const REPLICA_GAP = 5;
  const RANK_STOPS = [[47, 127, 208], [140, 100, 170], [224, 140, 40]];

  const rowHeight = (lanes) => {
    const n = lanes.length;
    return n <= 4 ? 34 : n <= 8 ? 28 : n <= 16 ? 21 : n <= 32 ? 15 : n <= 64 ? 10 : n <= 256 ? 6 : 3;
  };

  // Tops of the rows, with a gap between replicas.
  const place = (lanes) => {
    const height = rowHeight(lanes);
    let top = 2;
    const rows = lanes.map((lane, i) => {
      if (i && lanes[i - 1].dp !== lane.dp) top += Math.min(REPLICA_GAP, height);
      const row = { lane, top };
      top += height;
      return row;
    });
    return { rows, height, bottom: top + 2 };
  };

  const firstVisible = (timeline, lane, from) => {
    let low = lane.first;
    let high = lane.last;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (timeline.end[middle] <= from) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  const draw = (canvas, panel, view, width, kinds, showCritical) => {
    const { timeline } = panel;
    const { rows, height, bottom } = panel.placed;
    const ctx = context(canvas, width, bottom + AXIS);
    const x = scale(view, width);
    axis(ctx, x, 0, bottom, tickSeconds);
    const bar = Math.max(1, height - (height > 8 ? 3 : height > 4 ? 1 : 0));
    const buckets = kinds.map(() => [[], []]);
    const numbers = [];
    const critical = [];
    clip(ctx, x, 0, bottom);
    for (const { lane, top } of rows) {
      ctx.fillStyle = color("--idle");
      ctx.fillRect(x.at(0), top, x.factor * timeline.endS, bar);
      ctx.fillStyle = color("--tail");
      ctx.fillRect(x.at(timeline.endS), top, x.factor * Math.max(0, timeline.stepTimeS - timeline.endS), bar);
      for (let i = firstVisible(timeline, lane, x.low); i < lane.last && timeline.start[i] < x.high; i++) {
        const left = x.at(timeline.start[i]);
        const wide = x.factor * (timeline.end[i] - timeline.start[i]);
        buckets[timeline.kind[i]][timeline.pack[i] & 1].push(left, top, wide);
        if (height >= 14 && wide > 4 + 6.6 * String(timeline.pack[i]).length) numbers.push([i, left, top, wide]);
        if (showCritical && timeline.critical[i]) critical.push(left, top, wide);
      }
    }
    buckets.forEach((parities, kind) =>
      parities.forEach((rects, odd) => {
        ctx.fillStyle = odd ? kinds[kind].odd : kinds[kind].even;
        for (let k = 0; k < rects.length; k += 3) {
          // A hair of background between wide neighbours; none where it would eat the bar.
          ctx.fillRect(rects[k], rects[k + 1], rects[k + 2] > 4 ? rects[k + 2] - 0.6 : rects[k + 2], bar);
        }
      }),
    );
    ctx.fillStyle = color("--critical");
    for (let k = 0; k < critical.length; k += 3) {
      const thick = Math.max(1, Math.min(3, bar / 4));
      ctx.fillRect(critical[k], critical[k + 1] + bar - thick, critical[k + 2], thick);
    }
    ctx.textAlign = "center";
    for (const [i, left, top, wide] of numbers) {
      const style = kinds[timeline.kind[i]];
      ctx.fillStyle = timeline.pack[i] & 1 ? style.textOdd : style.textEven;
      ctx.fillText(String(timeline.pack[i]), left + wide / 2, top + bar / 2 + 0.5);
    }
    ctx.restore();
    names(ctx, panel.placed, bar);
  };

  // Every rank where rows are high enough for a name; else each replica once.
  const names = (ctx, { rows, height }, bar) => {
    const several = rows.some(({ lane }) => lane.dp !== rows[0].lane.dp);
    ctx.fillStyle = color("--text");
    ctx.textAlign = "right";
    let free = -Infinity;
    rows.forEach(({ lane, top }, i) => {
      const isFirst = !i || rows[i - 1].lane.dp !== lane.dp;
      if (height < 12 && !isFirst) return;
      if (top < free) return;
      free = top + 12;
      const text = several && isFirst ? `dp ${lane.dp} · rank ${lane.rank}` : `rank ${lane.rank}`;
      ctx.fillText(height < 12 && several ? `dp ${lane.dp}` : text, Evenload.chart.LEFT - 8, top + bar / 2 + 0.5);
    });
  };

  // Bytes a lane holds at a time; undefined before its first sample.
  const held = (timeline, lane, at) => {
    let low = lane.firstSample;
    let high = lane.lastSample;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (timeline.time[middle] <= at) low = middle + 1;
      else high = middle;
    }
    return low > lane.firstSample ? timeline.bytes[low - 1] : undefined;
  };

  const memoryScale = (panel, limitBytes) => {
    const peak = panel.placed.rows.reduce((most, { lane }) => Math.max(most, lane.peakBytes), 0);
    const most = Math.max(peak, limitBytes ?? 0) * 1.06 || 1;
    return { most, at: (value) => MEMORY_PX - 4 - (value / most) * (MEMORY_PX - 12) };
  };

  const laneColor = (panel, lane) =>
    rgb(blend(RANK_STOPS, panel.mostRank ? lane.rank / panel.mostRank : 0));

  const drawMemory = (canvas, panel, view, width, limitBytes) => {
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
    ctx.lineWidth = panel.placed.rows.length > 32 ? 0.8 : 1.5;
    for (const { lane } of panel.placed.rows) {
      ctx.strokeStyle = laneColor(panel, lane);
      ctx.beginPath();
      trace(ctx, timeline, lane, x, y);
      ctx.stroke();
    }
    if (limitBytes) {
      ctx.strokeStyle = color("--limit");
      ctx.lineWidth = 1.6;
      ctx.setLineDash([6, 4]);
      ctx.beginPath();
      ctx.moveTo(x.left, y.at(limitBytes));
      ctx.lineTo(x.right, y.at(limitBytes));
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.fillStyle = color("--limit");
      ctx.textAlign = "right";
      ctx.fillText(`limit ${bytes(limitBytes)}`, x.right - 6, y.at(limitBytes) + 9);
    }
    ctx.restore();
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

  // The task under a point of the timeline's canvas, or null.
  const taskAt = (panel, view, width, px, py) => {
    const { rows, height } = panel.placed;
    const row = rows.find(({ top }) => py >= top && py < top + height);
    const x = scale(view, width);
    if (!row || px < x.left || px > x.right) return null;
    // Half a pixel each side, so that thin bars can be met.
    const slack = 0.5 / x.factor;
    const at = x.value(px);
    let best = null;
    for (let i = firstVisible(panel.timeline, row.lane, at - slack); i < row.lane.last; i++) {
      if (panel.timeline.start[i] > at + slack) break;
      if (best === null || panel.timeline.start[i] <= at) best = i;
    }
    return best === null ? null : { task: best, lane: row.lane };
  };

  // The line nearest to a point of the memory canvas.
  const memoryAt = (panel, view, width, limitBytes, px, py) => {
    const x = scale(view, width);
    if (px < x.left || px > x.right || py > MEMORY_PX) return null;
    const y = memoryScale(panel, limitBytes);
    let best = null;
    for (const { lane } of panel.placed.rows) {
      const value = held(panel.timeline, lane, x.value(px));
      if (value === undefined) continue;
      const distance = Math.abs(y.at(value) - py);
      if (best === null || distance < best.distance) best = { lane, bytes: value, at: x.value(px), distance };
    }
    return best;
  };

  // Frames around all bars of a pack, on the overlay.
  const mark = (ctx, panel, view, width, { dp, direction, pack }) => {
    const x = scale(view, width);
    const { rows, height, bottom } = panel.placed;
    clip(ctx, x, 0, bottom);
    ctx.strokeStyle = color("--text");
    ctx.lineWidth = 1.6;
    for (const { lane, top } of rows) {
      if (lane.dp !== dp) continue;
      for (let i = firstVisible(panel.timeline, lane, x.low); i < lane.last && panel.timeline.start[i] < x.high; i++) {
        if (panel.timeline.pack[i] !== pack || (panel.timeline.kind[i] ? 1 : 0) !== direction) continue;
        const left = x.at(panel.timeline.start[i]);
        const wide = Math.max(1.5, x.factor * (panel.timeline.end[i] - panel.timeline.start[i]));
        ctx.strokeRect(left - 0.5, top - 1, wide + 1, height);
      }
    }
    ctx.restore();
  };

  return { MEMORY_PX, place, draw, drawMemory, held, taskAt, memoryAt, mark };
})();
