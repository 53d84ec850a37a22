package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"

	"autobyte/internal/lab"
)

// plainEvery is the least time between two lines about the same part where no bar can be drawn.
const plainEvery = 10 * time.Second

// newProgress shows progress on a terminal as bars, elsewhere as plain lines. done must be called before anything
// else is printed.
func newProgress(to io.Writer) (report lab.Progress, done func()) {
	file, isFile := to.(*os.File)
	if !isFile || !term.IsTerminal(int(file.Fd())) {
		return plainProgress(to), func() {}
	}
	bars := mpb.New(mpb.WithOutput(to), mpb.WithWidth(50))
	var bar *mpb.Bar
	var current string
	var last int
	report = func(part string, step, total int) {
		if bar == nil || part != current || step <= last {
			if bar != nil {
				bar.Abort(false)
			}
			bar = bars.AddBar(int64(total),
				mpb.PrependDecorators(decor.Name(part, decor.WC{W: 10, C: decor.DindentRight}), decor.CountersNoUnit("step %d of %d", decor.WC{W: 17, C: decor.DindentRight})),
				mpb.AppendDecorators(decor.Elapsed(decor.ET_STYLE_GO)))
		}
		current, last = part, step
		bar.SetCurrent(int64(step))
	}
	return report, func() {
		if bar != nil {
			bar.Abort(false) // does nothing to a bar that is complete
		}
		bars.Wait()
	}
}

func plainProgress(to io.Writer) lab.Progress {
	var current string
	var last int
	var printed time.Time
	return func(part string, step, total int) {
		begins := part != current || step <= last
		current, last = part, step
		if !begins && step != total && time.Since(printed) < plainEvery {
			return
		}
		printed = time.Now()
		fmt.Fprintf(to, "%s: step %d of %d\n", part, step, total)
	}
}
