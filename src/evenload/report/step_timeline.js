// Draws a step: one row a pipeline rank, one bar a task, true widths at any zoom.
"use strict";
Evenload.stepTimeline = (() => {
  const { AXIS, NARROW, color, context, scale, firstWhere, tickSeconds, axis, clip } = Evenload.chart;
  const REPLICA_GAP = 5;

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

  const firstVisible = (timeline, lane, from) => firstWhere(lane.first, lane.last, (task) => timeline.end[task] > from);

  const draw = (canvas, panel, view, width, { kinds, sides, tails }, showCritical) => {
    const { timeline } = panel;
    const { rows, height, bottom } = panel.placed;
    const ctx = context(canvas, width, bottom + AXIS);
    const x = scale(view, width);
    axis(ctx, x, 0, bottom, tickSeconds);
    const bar = Math.max(1, height - (height > 8 ? 3 : height > 4 ? 1 : 0));
    const buckets = kinds.map(() => [[], [], []]);
    const numbers = [];
    const critical = [];
    clip(ctx, x, 0, bottom);
    for (const { lane, top } of rows) {
      ctx.fillStyle = color("--idle");
      ctx.fillRect(x.at(0), top, x.factor * timeline.endS, bar);
      const ends = timeline.tail.length ? timeline.tail : [[null, timeline.endS, Math.max(timeline.stepTimeS, timeline.endS)]];
      for (const [kind, from, to] of ends) {
        ctx.fillStyle = kind ? tails[kind].color : color("--tail");
        ctx.fillRect(x.at(from), top, x.factor * (to - from), bar);
      }
      for (let i = firstVisible(timeline, lane, x.low); i < lane.last && timeline.start[i] < x.high; i++) {
        const left = x.at(timeline.start[i]);
        const wide = x.factor * (timeline.end[i] - timeline.start[i]);
        // Light and dark in turn only where the eye can tell; stripes of a pixel would be noise.
        buckets[timeline.kind[i]][wide < 2.5 ? 2 : timeline.pack[i] & 1].push(left, top, wide);
        if (height >= 14 && wide > 4 + 6.6 * String(timeline.pack[i]).length) numbers.push([i, left, top, wide]);
        if (showCritical && timeline.critical[i]) critical.push(left, top, wide);
      }
    }
    buckets.forEach((shades, kind) =>
      shades.forEach((rects, shade) => {
        ctx.fillStyle = [kinds[kind].even, kinds[kind].odd, kinds[kind].thin][shade];
        for (let k = 0; k < rects.length; k += 3) {
          // A hair of background between wide neighbours; none where it would eat the bar.
          ctx.fillRect(rects[k], rects[k + 1], rects[k + 2] > 4 ? rects[k + 2] - 0.6 : rects[k + 2], bar);
        }
      }),
    );
    for (const { lane, top } of timeline.sides ? rows : []) drawSides(ctx, timeline, lane, x, top, bar, height, sides);
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
    names(ctx, panel.placed, bar, x.left, width < NARROW);
  };

  // Recompute shades the front of its bar; copies run beside compute, as a line under the bars.
  const drawSides = (ctx, timeline, lane, x, top, bar, height, sides) => {
    const { kind, start, end } = timeline.sides;
    for (let i = lane.firstSide; i < lane.lastSide; i++) {
      if (end[i] < x.low || start[i] > x.high) continue;
      const isInside = sides[kind[i]].inside;
      ctx.fillStyle = sides[kind[i]].color;
      const thick = isInside ? bar : Math.max(1, height - bar - 1);
      ctx.fillRect(x.at(start[i]), isInside ? top : top + height - thick, x.factor * (end[i] - start[i]), thick);
    }
  };

  // Every rank where rows are high enough for a name; else each replica once.
  const names = (ctx, { rows, height }, bar, left, isNarrow) => {
    const several = rows.some(({ lane }) => lane.dp !== rows[0].lane.dp);
    ctx.fillStyle = color("--text");
    ctx.textAlign = "right";
    let free = -Infinity;
    rows.forEach(({ lane, top }, i) => {
      const isFirst = !i || rows[i - 1].lane.dp !== lane.dp;
      if (height < 12 && !isFirst) return;
      if (top < free) return;
      free = top + 12;
      const rank = isNarrow && several ? `${lane.rank}` : `rank ${lane.rank}`;
      const text = several && isFirst ? `dp ${lane.dp} · ${rank}` : rank;
      ctx.fillText(height < 12 && several ? `dp ${lane.dp}` : text, left - 8, top + bar / 2 + 0.5);
    });
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

  return { place, draw, taskAt, mark };
})();
