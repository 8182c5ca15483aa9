// How many texts a page has, and those whose contrast is below that of WCAG AA.
() => {
  const parse = (text) => (text.match(/[\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const over = (top, under) => { const a = top[3] ?? 1; return [0, 1, 2].map((i) => a * top[i] + (1 - a) * under[i]); };
  const back = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      const colour = parse(style.backgroundColor);
      if (style.opacity !== '1') throw new Error('opacity is not counted here: ' + at.className);
      layers.push(colour);
      if ((colour[3] ?? 1) === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const unseen = !element.checkVisibility() || element.closest('noscript, script, option');
    if (unseen || !walker.currentNode.data.trim()) continue;
    const style = getComputedStyle(element);
    const under = back(element);
    const text = over(parse(style.color), under);
    const [a, b] = [light(text), light(under)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    seen += 1;
    const words = walker.currentNode.data.slice(0, 40);
    if (ratio < (large ? 3 : 4.5)) found.push(`${ratio.toFixed(2)} ${element.className} ${words}`);
  }
  return [seen, found];
}
