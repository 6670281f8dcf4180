// Mouse, pen and fingers over the pictures of the step view: drag to zoom, move, pinch, tap.
"use strict";
Evenload.stepPointer = (() => {
  const { scale } = Evenload.chart;
  const LEAST_PX = 4;

  // `view`: { of, set, zoom, pan, select, hover, rest }, all by the kind of axis ("timeline" or "documents").
  const listen = (pair, view) => {
    const { kind, over } = pair;
    const axisKind = kind === "memory" ? "timeline" : kind;
    const place = (event) => {
      const box = over.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const axis = () => scale(view.of(axisKind), pair.width);
    const valueAt = (event) => {
      const x = axis();
      return x.value(Math.min(Math.max(place(event)[0], x.left), x.right));
    };

    let held = null;
    const fingers = new Map();
    over.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      over.setPointerCapture(event.pointerId);
      view.rest();
      if (event.pointerType === "touch") {
        fingers.set(event.pointerId, { x: event.clientX, moved: false });
        return;
      }
      held = { x: event.clientX, from: valueAt(event), pans: event.shiftKey, view: view.of(axisKind) };
    });

    // One finger moves the picture, two stretch it.
    const touch = (event) => {
      const finger = fingers.get(event.pointerId);
      if (!finger) return;
      const by = event.clientX - finger.x;
      if (!finger.moved && Math.abs(by) <= LEAST_PX) return;
      const others = [...fingers.values()].filter((one) => one !== finger);
      if (others.length) {
        const before = Math.max(20, Math.abs(finger.x - others[0].x));
        const now = Math.max(20, Math.abs(event.clientX - others[0].x));
        const left = over.getBoundingClientRect().left;
        view.zoom(before / now, axis().value((event.clientX + others[0].x) / 2 - left), axisKind);
      } else view.pan(-by / pair.width, axisKind);
      finger.x = event.clientX;
      finger.moved = true;
    };

    over.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") {
        touch(event);
      } else if (!held) {
        view.hover(pair, event, place(event));
      } else if (held.pans) {
        const by = (held.x - event.clientX) / scale(held.view, pair.width).factor;
        view.set([held.view[0] + by, held.view[1] + by], axisKind);
      } else view.select(kind, [held.from, valueAt(event)]);
    });
    const release = (event) => {
      if (event.pointerType === "touch") {
        const finger = fingers.get(event.pointerId);
        fingers.delete(event.pointerId);
        if (finger && !finger.moved && event.type === "pointerup") view.hover(pair, event, place(event));
        return;
      }
      if (!held) return;
      const { x, from, pans } = held;
      held = null;
      view.select(kind, null);
      if (!pans && event.type === "pointerup" && Math.abs(event.clientX - x) > LEAST_PX) {
        view.set([from, valueAt(event)].sort((a, b) => a - b), axisKind);
      }
    };
    over.addEventListener("pointerup", release);
    over.addEventListener("pointercancel", release);
    over.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") view.rest();
    });
    over.addEventListener("dblclick", () => view.set(null, axisKind));
    over.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        view.zoom(1.0015 ** event.deltaY, valueAt(event), axisKind);
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        view.pan(event.deltaX / pair.width, axisKind);
      }
    }, { passive: false });
  };

  return { listen };
})();
