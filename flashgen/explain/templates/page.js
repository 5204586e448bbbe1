// Shows the parts of one length and one variant. All of them are in the page.
(() => {
  const slider = document.getElementById("length");
  const steps = document.getElementById("lengths").options;
  const said = document.getElementById("length-said");
  const variant = document.getElementById("variant");

  function show() {
    const step = steps[slider.value];
    said.value = step.label;
    slider.setAttribute("aria-valuetext", step.label);
    for (const part of document.querySelectorAll("[data-at]")) {
      part.hidden = !part.dataset.at.split(" ").includes(step.dataset.length);
    }
    if (variant) {
      for (const article of document.querySelectorAll("article")) {
        article.hidden = article.dataset.variant !== variant.value;
      }
    }
  }

  slider.addEventListener("input", show);
  if (variant) variant.addEventListener("change", show);
  document.getElementById("controls").hidden = false;
  show(); // a browser may have kept where the slider stood
})();
