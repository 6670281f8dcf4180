// Draws the plan of a step by document: one row a document, its forward slices over its backward slices.
"use strict";
Evenload.stepDocuments = (() => {
  const { AXIS, color, context, scale, count, axis, clip, blend, rgb } = Evenload.chart;
  const ROW_PX = 18, HALF_PX = 7;
  const MOST_PX = 360;
  // Early to late in the step, distinct also for colour-blind readers and on both backgrounds (after viridis).
  const STOPS = [[72, 60, 140], [49, 104, 142], [33, 145, 140], [70, 190, 110], [200, 205, 40]];

  // Documents with a slice in one of the replicas, longest first.
  const rowsOf = (plan, replicas) => {
    const rows = [];
    plan.slicesOfDoc.forEach((slices, doc) => {
      const shown = slices.filter(({ pack }) => replicas.has(plan.packs[pack].dp));
      if (shown.length) rows.push({ doc, slices: shown });
    });
    return rows.sort((a, b) => plan.docTokens[b.doc] - plan.docTokens[a.doc] || a.doc - b.doc);
  };

  const heightOf = (rows) => Math.min(MOST_PX, rows.length * ROW_PX + AXIS + 4);

  const packColor = (plan, pack) => {
    const { dp, direction, index } = plan.packs[pack];
    const many = plan.counts.get(`${dp}/${direction}`) - 1;
    const parts = blend(STOPS, many ? index / many : 0);
    // Every other pack lighter, so that neighbouring slices show.
    return rgb(index % 2 ? parts.map((part) => Math.round(part + (255 - part) * 0.3)) : parts);
  };

  const draw = (canvas, panel, view, width, scrollTop, marked) => {
    const { plan, documents } = panel;
    const height = heightOf(documents);
    const ctx = context(canvas, width, height);
    const x = scale(view, width);
    const bottom = height - AXIS;
    axis(ctx, x, 0, bottom, count);
    const first = Math.floor(scrollTop / ROW_PX);
    for (let r = first; r < documents.length && r * ROW_PX - scrollTop < bottom; r++) {
      const { doc, slices } = documents[r];
      const top = 2 + r * ROW_PX - scrollTop;
      ctx.save();
      ctx.beginPath();
      ctx.rect(0, 0, width, bottom);
      ctx.clip();
      ctx.fillStyle = color("--text");
      ctx.textAlign = "right";
      ctx.fillText(`doc ${plan.docId[doc]}`, x.left - 8, top + HALF_PX);
      ctx.restore();
      clip(ctx, x, 0, bottom);
      for (const { slice, pack } of slices) {
        const left = x.at(plan.sliceStart[slice]);
        const wide = Math.max(1.5, x.factor * plan.sliceLength[slice]);
        if (left > x.right || left + wide < x.left) continue;
        const y = top + (plan.packs[pack].direction ? HALF_PX + 1 : 0);
        ctx.fillStyle = packColor(plan, pack);
        ctx.fillRect(left, y, wide > 4 ? wide - 0.8 : wide, HALF_PX);
        if (marked === pack) {
          ctx.strokeStyle = color("--text");
          ctx.lineWidth = 1.6;
          ctx.strokeRect(left - 0.5, y - 0.5, wide + 1, HALF_PX + 1);
        }
      }
      const right = x.at(plan.docTokens[doc]) + 6;
      ctx.fillStyle = color("--muted");
      ctx.textAlign = "left";
      if (right < x.right - 40) ctx.fillText(count(plan.docTokens[doc]), Math.max(right, x.left + 4), top + HALF_PX);
      ctx.restore();
    }
  };

  const sliceAt = (panel, view, width, scrollTop, px, py) => {
    const { plan, documents } = panel;
    const x = scale(view, width);
    const row = documents[Math.floor((py - 2 + scrollTop) / ROW_PX)];
    if (!row || px < x.left || px > x.right || py > heightOf(documents) - AXIS) return null;
    const direction = (py - 2 + scrollTop) % ROW_PX > HALF_PX ? 1 : 0;
    const at = x.value(px);
    const slack = 2 / x.factor;
    const found = row.slices.filter(({ slice, pack }) => {
      const start = plan.sliceStart[slice];
      return (
        plan.packs[pack].direction === direction && at >= start - slack && at < start + plan.sliceLength[slice] + slack
      );
    });
    const exact = found.find(({ slice }) => at >= plan.sliceStart[slice] && at < plan.sliceStart[slice] + plan.sliceLength[slice]);
    return exact ?? found[0] ?? null;
  };

  const gradient = `linear-gradient(90deg,${STOPS.map(rgb).join(",")})`;

  return { ROW_PX, gradient, rowsOf, heightOf, draw, sliceAt };
})();
