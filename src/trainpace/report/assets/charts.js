// Draws Chart records (see trainpace/report/charts.py) with uPlot. A page holds, for each, a figure of class "chart" with an
// element of class "plot", in it one of class "tip" and one of class "said", and the record as a JSON script element
// (trainpace/report/templates/figures.html makes it). Figures are drawn when the page has loaded, and those that come later (htmx,
// what-if) as soon as they are in the page. To change one in place: trainpaceCharts.draw(figure, record).
(() => {
  "use strict";
  const HEIGHT = 330, PAPER_WIDTH = 680, PAPER_HEIGHT = 250, PAPER_SCALE = 3, REACH = 40, HEADROOM = 0.06, LABEL_ROW = 16, BETWEEN = 24;
  const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((times) => times * 10 ** power));
  const figures = new Map(); // figure -> {chart, plot, width}
  let paper = false;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const tone = (name) => css("--tone-" + name) || css("--ink");

  function number(value) {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (size >= 999.5) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(3)));
  }
  const quantity = (value, axis) => (axis.unit === "$" ? "$" + number(value) : number(value) + (axis.unit ? " " + axis.unit : ""));

  // ---- data: one row for every x, several where one series has several points there

  function aligned(chart) {
    const most = new Map();
    for (const s of chart.series) {
      const here = new Map();
      for (const x of s.x) here.set(x, (here.get(x) || 0) + 1);
      for (const [x, n] of here) most.set(x, Math.max(n, most.get(x) || 0));
    }
    const distinct = [...most.keys()].sort((a, b) => a - b), start = new Map(), xs = [];
    for (const x of distinct) {
      start.set(x, xs.length);
      for (let i = 0; i < most.get(x); i++) xs.push(x);
    }
    const index = chart.series.map((s) => {
      const column = Array(xs.length).fill(-1), seen = new Map();
      s.x.forEach((x, i) => {
        const k = seen.get(x) || 0;
        seen.set(x, k + 1);
        column[start.get(x) + k] = i;
      });
      return column;
    });
    // null is a gap in a line, undefined a row of other series
    const columns = chart.series.map((s, n) =>
      index[n].map((i) => (i < 0 ? undefined : s.kind === "area" ? s.high[i] : s.y[i])));
    return { xs, distinct, index, columns };
  }

  function range(axis, values, padded, top) {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (v !== null && v !== undefined && (axis.scale === "linear" || v > 0)) {
      if (v < low) low = v;
      if (v > high) high = v;
    }
    if (low > high) [low, high] = axis.scale === "linear" ? [0, 1] : [1, 10];
    if (axis.scale === "linear") {
      const span = high - low || Math.abs(high) || 1;
      return [axis.low ?? low - padded * span, axis.high ?? high + (padded || top) * span + top * span];
    }
    const ratio = Math.max(high / low, 1.5) ** Math.max(padded, 0.04);
    return [axis.low ?? low / ratio, axis.high ?? high * ratio ** (top ? 2 : 1)];
  }

  function extents(chart) {
    const xs = chart.series.flatMap((s) => s.x), ys = chart.series.flatMap((s) => [...s.y, ...s.low, ...s.high]);
    for (const m of chart.marks) {
      if (m.axis === "y") ys.push(m.at);
      else xs.push(m.at);
    }
    const upright = chart.marks.filter((m) => m.axis === "x").length;
    const pad = chart.series.some((s) => s.kind === "points") ? 0.03 : 0;
    return { x: range(chart.x, xs, pad, 0), y: range(chart.y, ys, 0, HEADROOM * (1 + Math.min(upright, 3))) };
  }

  // ---- drawing beyond what uPlot draws: areas, bands, spreads, points, marks

  function painter(chart, scale) {
    const font = (weight) => weight + " " + 12 * scale * devicePixelRatio + "px system-ui, sans-serif";
    const px = (size) => size * scale * devicePixelRatio;
    const X = (u, v) => u.valToPos(v, "x", true), Y = (u, v) => u.valToPos(v, "y", true);

    function clipped(u, paint) {
      const c = u.ctx, b = u.bbox;
      c.save();
      c.beginPath();
      c.rect(b.left, b.top - px(6), b.width, b.height + px(12));
      c.clip();
      paint(c);
      c.restore();
    }

    function under(u) {
      clipped(u, (c) => {
        for (const s of chart.series) {
          if (s.kind === "points" || !s.low.length) continue;
          c.globalAlpha = s.kind === "area" ? 0.92 : 0.18;
          c.fillStyle = tone(s.tone);
          c.beginPath();
          s.x.forEach((x, i) => c[i ? "lineTo" : "moveTo"](X(u, x), Y(u, s.high[i])));
          for (let i = s.x.length - 1; i >= 0; i--) c.lineTo(X(u, s.x[i]), Y(u, s.low[i]));
          c.fill();
          if (s.kind === "area" && css("--texture-" + s.tone)) textured(u, c, css("--texture-" + s.tone));
        }
      });
    }

    // over the area that is the path now: stripes, or dots
    function textured(u, c, kind) {
      const b = u.bbox, step = px(7);
      c.save();
      c.clip();
      c.globalAlpha = 0.45;
      c.strokeStyle = c.fillStyle = css("--page");
      c.lineWidth = px(1.2);
      c.beginPath();
      if (kind === "stripes") for (let x = b.left - b.height; x < b.left + b.width; x += step) { c.moveTo(x, b.top + b.height); c.lineTo(x + b.height, b.top); }
      else for (let x = b.left; x < b.left + b.width; x += step) for (let y = b.top; y < b.top + b.height; y += step) c.rect(x, y, px(1.6), px(1.6));
      if (kind === "stripes") c.stroke();
      else c.fill();
      c.restore();
    }

    function over(u) {
      clipped(u, (c) => {
        for (const s of chart.series) if (s.kind === "points") points(u, c, s);
      });
      marks(u, u.ctx);
    }

    function points(u, c, s) {
      c.setLineDash([]);
      c.strokeStyle = c.fillStyle = tone(s.tone);
      c.lineWidth = px(1.5);
      s.x.forEach((x, i) => {
        if (s.y[i] === null || s.y[i] === undefined) return;
        const at = X(u, x), y = Y(u, s.y[i]);
        if (s.low.length) {
          c.globalAlpha = 0.6;
          c.beginPath();
          c.moveTo(at, Y(u, s.low[i]));
          c.lineTo(at, Y(u, s.high[i]));
          c.stroke();
        }
        c.globalAlpha = s.sizes.length ? 0.75 : 1;
        c.beginPath();
        c.arc(at, y, px(s.sizes.length ? 3 + 11 * Math.sqrt(s.sizes[i]) : 3.5), 0, 7);
        c.fill();
      });
    }

    function marks(u, c) {
      const taken = [], b = u.bbox, crowded = pointBoxes(u);
      c.save();
      c.font = font("600");
      c.textAlign = "left"; // uPlot leaves its axes' alignment behind, and a line's dashes
      c.setLineDash([]);
      c.textBaseline = "alphabetic";
      c.lineWidth = px(1.5);
      const ordered = [...chart.marks].sort((m, n) => (m.axis < n.axis ? -1 : m.axis > n.axis ? 1 : m.at - n.at));
      for (const m of ordered) {
        c.strokeStyle = tone(m.tone);
        if (m.axis === "point") {
          const x = X(u, m.at), y = Y(u, m.y);
          c.beginPath();
          c.arc(x, y, px(7), 0, 7);
          if (!chart.series.some((s) => s.sizes.length)) c.stroke();
          label(c, m, taken, crowded, b, [[x + px(10), y + px(4)], [x + px(10), y - px(10)], [x + px(10), y + px(18)],
            [x - px(10), y - px(10), 1], [x - px(10), y + px(18), 1], [x - px(10), y + px(4), 1],
            [x + px(10), y - px(26)], [x - px(10), y - px(26), 1], [x + px(10), y + px(34)], [x - px(10), y + px(34), 1],
            ...[-42, -58, 50, 66].flatMap((dy) => [[x + px(10), y + px(dy)], [x - px(10), y + px(dy), 1]])]);
          continue;
        }
        const upright = m.axis === "x", at = upright ? X(u, m.at) : Y(u, m.at);
        c.setLineDash(upright ? [px(2), px(3)] : [px(7), px(4)]);
        c.beginPath();
        if (upright) { c.moveTo(at, b.top); c.lineTo(at, b.top + b.height); }
        else { c.moveTo(b.left, at); c.lineTo(b.left + b.width, at); }
        c.stroke();
        c.setLineDash([]);
        const rows = upright
          ? [0, 1, 2, 3, 4, 5].flatMap((i) => [[at + px(5), b.top + px(12 + LABEL_ROW * i)], [at - px(5), b.top + px(12 + LABEL_ROW * i), 1]])
          : [[b.left + b.width - px(6), at - px(6), 1], [b.left + b.width - px(6), at + px(15), 1], [b.left + px(6), at - px(6)]];
        label(c, m, taken, [], b, rows);
      }
      c.restore();
    }

    function lineBoxes(u) {
      if (chart.nearest !== "point") return [];
      return chart.series.filter((s) => s.kind === "line").flatMap((s) => s.x.slice(1).flatMap((_, i) => {
        const [x0, y0, x1, y1] = [X(u, s.x[i]), Y(u, s.y[i]), X(u, s.x[i + 1]), Y(u, s.y[i + 1])];
        return Array.from({ length: BETWEEN + 1 }, (_, k) => [x0 + (x1 - x0) * k / BETWEEN, y0 + (y1 - y0) * k / BETWEEN]).map(([x, y]) => [x - 1, y - 1, x + 1, y + 1]);
      }));
    }

    function pointBoxes(u) {
      return [...lineBoxes(u), ...sizedBoxes(u)];
    }

    function sizedBoxes(u) {
      return chart.series.filter((s) => s.sizes.length).flatMap((s) => s.x.map((x, i) => {
        const at = X(u, x), y = Y(u, s.y[i]), r = px(3 + 11 * Math.sqrt(s.sizes[i]));
        return [at - r, y - r, at + r, y + r];
      }));
    }

    // at the first place that is free, if there is one that is free of points too; a name that finds none is read by pointing
    function label(c, m, taken, crowded, b, places) {
      if (!labelled(c, m, taken, crowded, b, places)) labelled(c, m, taken, [], b, places);
    }

    function labelled(c, m, taken, crowded, b, places) {
      const width = c.measureText(m.text).width, height = px(14);
      for (const [x, y, end] of places) {
        const left = end ? x - width : x, box = [left, y - height, left + width, y + px(3)];
        const inside = box[0] >= b.left && box[2] <= b.left + b.width && box[1] >= b.top - px(8) && box[3] <= b.top + b.height;
        if (!inside || [...taken, ...crowded].some((t) => box[0] - px(8) < t[2] && t[0] < box[2] + px(8) && box[1] < t[3] && t[1] < box[3])) continue;
        taken.push(box);
        c.lineWidth = px(4);
        c.lineJoin = "round";
        c.strokeStyle = css("--page");
        c.strokeText(m.text, left, y);
        c.fillStyle = tone(m.tone);
        c.fillText(m.text, left, y);
        c.lineWidth = px(1.5);
        return true;
      }
      return false;
    }
    return { under, over };
  }

  // ---- reading values: by pointer, or by arrow keys

  function reader(figure, chart, data) {
    const tip = figure.querySelector(".tip"), said = figure.querySelector(".said");
    const stops = chart.nearest === "x"
      ? data.distinct.map((x) => ({ x }))
      : chart.series.flatMap((s, n) => (s.kind === "points" ? s.x.map((x, i) => ({ x, n, i })) : []))
        .filter((p) => chart.series[p.n].y[p.i] !== null).sort((a, b) => a.x - b.x);
    let stop = -1;

    const value = (s, i) => {
      if (s.kind === "area") return quantity(s.high[i] - s.low[i], chart.y);
      const spread = s.low.length ? ` (${number(s.low[i])} to ${number(s.high[i])})` : "";
      return (s.y[i] === null ? "–" : quantity(s.y[i], chart.y)) + spread;
    };

    function lines(at) {
      if (at.n !== undefined) {
        const s = chart.series[at.n];
        return [s.labels[at.i] || s.name, `${chart.x.label}: ${quantity(at.x, chart.x)}`, `${chart.y.label}: ${value(s, at.i)}`];
      }
      const rows = [`${chart.x.label} ${quantity(at.x, chart.x)}`];
      chart.series.forEach((s) => {
        s.x.forEach((x, i) => { if (x === at.x && (s.kind === "area" || s.y[i] !== null)) rows.push(`${s.labels[i] || s.name}: ${value(s, i)}`); });
      });
      for (const m of chart.marks) if (m.axis !== "y" && Math.abs(m.at - at.x) <= 0.5 && chart.x.scale === "linear") rows.push(m.text);
      return rows;
    }

    function show(u, at, aloud) {
      const rows = lines(at), y = height(at);
      tip.replaceChildren(...rows.map((row, i) => Object.assign(document.createElement(i ? "span" : "strong"), { textContent: row })));
      tip.hidden = false;
      const left = u.valToPos(at.x, "x") + u.bbox.left / devicePixelRatio, top = u.valToPos(y, "y") + u.bbox.top / devicePixelRatio;
      const room = figure.querySelector(".plot").clientWidth;
      tip.style.left = Math.max(0, left + 14 + tip.offsetWidth > room ? left - 14 - tip.offsetWidth : left + 14) + "px";
      tip.style.top = Math.max(0, top - tip.offsetHeight / 2) + "px";
      if (aloud) said.textContent = rows.join("; ");
    }

    function height(at) {
      if (at.n !== undefined) return chart.series[at.n].y[at.i];
      const found = chart.series.flatMap((s) => s.x.flatMap((x, i) => (x === at.x ? [s.kind === "area" ? s.high[i] : s.y[i]] : [])));
      return Math.max(...found.filter((v) => v !== null && v !== undefined), -Infinity);
    }

    function near(u, left, top) {
      let best = null, least = chart.nearest === "x" ? Infinity : REACH;
      for (const at of stops) {
        const far = chart.nearest === "x" ? Math.abs(u.valToPos(at.x, "x") - left)
          : Math.hypot(u.valToPos(at.x, "x") - left, u.valToPos(height(at), "y") - top);
        if (far < least) { least = far; best = at; }
      }
      return best;
    }

    return {
      stops,
      point(u) {
        const at = u.cursor.left < 0 ? null : near(u, u.cursor.left, u.cursor.top);
        if (at) show(u, at, false);
        else if (stop < 0) tip.hidden = true;
      },
      key(u, name) {
        if (name === "Escape") { stop = -1; tip.hidden = true; return true; }
        const to = { ArrowRight: stop + 1, ArrowLeft: stop - 1, Home: 0, End: stops.length - 1 }[name];
        if (to === undefined || !stops.length) return false;
        stop = Math.min(Math.max(to, 0), stops.length - 1);
        show(u, stops[stop], true);
        return true;
      },
      leave() { stop = -1; tip.hidden = true; },
    };
  }

  // ---- one figure

  // 1, 2 and 5 of every power of ten, more where there is one power, powers alone where these are many; powers of two on such an axis
  function logSplits(kind, min, max) {
    const base = kind === "log2" ? 2 : 10, first = Math.floor(Math.log(min) / Math.log(base) + 1e-9), splits = [];
    const powers = Math.log(max / min) / Math.log(base);
    const within = base !== 10 || powers > 4 ? [1] : powers > 1.2 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 8], every = Math.ceil(powers / 12);
    for (let power = first; base ** power <= max * 1.000001; power += every)
      for (const times of within) {
        const at = times * base ** power;
        if (at >= min * 0.999999 && at <= max * 1.000001) splits.push(at);
      }
    return splits;
  }

  function axis(of, side, scale, whole) {
    const line = { stroke: css("--line"), width: scale };
    return {
      side, scale: side === 2 ? "x" : "y", stroke: css("--soft"), font: 12 * scale + "px system-ui, sans-serif",
      grid: line, ticks: { ...line, size: 5 * scale }, gap: 5 * scale, space: (side === 2 ? 64 : 36) * scale,
      ...(whole ? { incrs: WHOLE } : {}),
      ...(of.scale === "linear" ? {} : { splits: (u, n, min, max) => logSplits(of.scale, min, max), filter: (u, splits) => splits }),
      values: (u, splits) => splits.map((v) => (v === null || v === undefined ? "" : number(v))),
      size: (u, values) => {
        if (side === 2) return 26 * scale;
        u.ctx.font = 12 * scale * devicePixelRatio + "px system-ui, sans-serif";
        const widest = Math.max(0, ...(values || []).map((v) => (v ? u.ctx.measureText(v).width : 0)));
        return Math.ceil(widest / devicePixelRatio) + 14 * scale;
      },
    };
  }

  function draw(figure, record) {
    const host = figure.querySelector(".plot");
    const old = figures.get(figure);
    if (old) old.plot.destroy();
    const chart = record || (old && old.chart) || JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    const scale = paper ? PAPER_SCALE : 1, width = paper ? PAPER_WIDTH : host.clientWidth, limits = extents(chart);
    const data = aligned(chart), paint = painter(chart, scale), read = reader(figure, chart, data);
    const scaled = (of, [min, max]) => ({
      time: false, range: () => [min, max], distr: of.scale === "linear" ? 1 : 3, log: of.scale === "log2" ? 2 : 10,
    });
    const plot = new uPlot({
      width: width * scale, height: (paper ? PAPER_HEIGHT : HEIGHT) * scale, padding: [10 * scale, 14 * scale, 0, 0], legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: { x: scaled(chart.x, limits.x), y: scaled(chart.y, limits.y) },
      axes: [axis(chart.x, 2, scale, chart.series.every((s) => s.x.every(Number.isInteger))), axis(chart.y, 3, scale)],
      series: [{}, ...chart.series.map((s) => ({
        label: s.name, stroke: tone(s.tone), width: (s.kind === "line" ? 2 : 0) * scale, show: s.kind === "line",
        dash: s.dashed ? [7 * scale, 5 * scale] : undefined, points: { show: false },
      }))],
      hooks: { drawAxes: [paint.under], draw: [paint.over], setCursor: [read.point] },
    }, [data.xs, ...data.columns], host);
    const canvas = plot.ctx.canvas;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", chart.finding);
    figures.set(figure, { chart, plot, width });
    if (!old) {
      host.addEventListener("keydown", (event) => {
        const now = figures.get(figure);
        if (now.read.key(now.plot, event.key)) event.preventDefault();
      });
      host.addEventListener("blur", () => figures.get(figure).read.leave());
      new ResizeObserver(() => {
        if (!paper && host.clientWidth && host.clientWidth !== figures.get(figure).width) draw(figure);
      }).observe(host);
    }
    figures.get(figure).read = read;
    return plot;
  }

  function drawAll(root = document) {
    for (const figure of root.querySelectorAll("figure.chart")) if (!figures.has(figure)) draw(figure);
  }

  function redraw() {
    for (const figure of [...figures.keys()]) {
      if (figure.isConnected) draw(figure);
      else { figures.get(figure).plot.destroy(); figures.delete(figure); }
    }
  }

  function onPaper(is) {
    paper = is;
    document.documentElement.classList.toggle("paper", is);
    redraw();
  }

  function start() {
    drawAll();
    new MutationObserver((changes) => {
      if (changes.some((c) => [...c.addedNodes].some((n) => n.nodeType === 1 && (n.matches("figure.chart") || n.querySelector("figure.chart"))))) {
        for (const [figure, { plot }] of figures) if (!figure.isConnected) { plot.destroy(); figures.delete(figure); }
        drawAll();
      }
    }).observe(document.body, { childList: true, subtree: true });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("beforeprint", () => onPaper(true));
    addEventListener("afterprint", () => onPaper(false));
  }

  globalThis.trainpaceCharts = { draw, drawAll, redraw };
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
  else start();
})();
