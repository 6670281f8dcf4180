"""What tests do with a report's page in a real browser: draw, choose, point, and look at pixels."""


def plots(page, figure):
    """Pictures of a figure."""
    page.locator(f"#{figure}").scroll_into_view_if_needed()
    return page.locator(f"#{figure} svg.plot")


def steps(page):
    """The step view, drawn."""
    page.wait_for_selector("#step-view[data-drawn]")
    page.evaluate("document.querySelector('#step-view .controls').scrollIntoView()")
    page.wait_for_timeout(100)
    return page.locator("#step-view")


def choose(page, name, value):
    page.evaluate("document.getElementById('step-view').removeAttribute('data-drawn')")
    page.locator(f"#step-view select[name={name}]").select_option(value)
    return steps(page)


def pixel(page, canvas, x, y):
    """Colour at a place of the window, "#rrggbb"."""
    return canvas.evaluate(
        """(canvas, [x, y]) => {
            const box = canvas.getBoundingClientRect();
            const ratio = canvas.width / box.width;
            const at = [(x - box.left) * ratio, (y - box.top) * ratio];
            const [r, g, b] = canvas.getContext("2d").getImageData(...at, 1, 1).data;
            return "#" + [r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("");
        }""",
        [x, y],
    )


def task_box(page, panel, task):
    return page.evaluate(
        "([panel, task]) => document.getElementById('step-view').stepView.taskBox(panel, task)", [panel, task]
    )


def find_task(page, panel, **wanted):
    """Index of the first task with these columns in a panel."""
    return page.evaluate(
        """([panel, wanted]) => {
            const keys = ["kind", "stage", "pack"].filter((key) => wanted[key] !== undefined);
            const matches = (t, i) => keys.every((key) => t[key][i] === wanted[key]);
            const { timeline, placed } = document.getElementById("step-view").stepView.panels()[panel];
            for (const { lane } of placed.rows) {
                if (wanted.dp !== undefined && lane.dp !== wanted.dp) continue;
                for (let i = lane.first; i < lane.last; i++) {
                    if (matches(timeline, i)) return i;
                }
            }
            return -1;
        }""",
        [panel, wanted],
    )


def hover_task(page, panel, **wanted):
    box = task_box(page, panel, find_task(page, panel, **wanted))
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector(".tip:not([hidden])")
    return page.locator(".tip").inner_text()


def view(page):
    """What is shown of the step, once it stands still."""
    page.wait_for_timeout(200)
    return [float(page.locator("#step-view .stage").get_attribute(f"data-{end}")) for end in ("from", "to")]
