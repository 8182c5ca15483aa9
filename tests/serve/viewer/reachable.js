// Number everything that the keyboard should reach; returns how many there are.
() => {
  const wanted = [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')]
    .filter((one) => one.checkVisibility() && one.tabIndex >= 0 && !one.disabled)
    .filter((one) => !one.closest('details:not([open]) > :not(summary)'));
  wanted.forEach((one, at) => { one.reachable = at; });
  return wanted.length;
}
