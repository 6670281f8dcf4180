// The box beside the pointer: lines of plain text (never markup). One for all pictures of a page.
"use strict";
const Evenload = {};
Evenload.tip = (() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;

  // A line is text, or [bold text, text]; `place` is a pointer's event or any { clientX, clientY }.
  const show = (lines, place) => {
    if (!tip.isConnected) document.body.append(tip);
    tip.replaceChildren(
      ...lines.map((line) => {
        const row = document.createElement("div");
        if (Array.isArray(line)) {
          const strong = document.createElement("b");
          strong.textContent = line[0];
          row.append(strong, line[1]);
        } else row.textContent = line;
        return row;
      }),
    );
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const { clientX, clientY } = place;
    const left = clientX + 16 + width > window.innerWidth ? clientX - 16 - width : clientX + 16;
    const top = clientY + 18 + height > window.innerHeight ? clientY - 14 - height : clientY + 18;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  };
  const hide = () => {
    tip.hidden = true;
  };
  return { show, hide };
})();
