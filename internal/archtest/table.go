package archtest

// A Row says what one package may import of this module, and why not more. The
// standard library and other modules are not its business, except that only
// tests and test-only packages may import the libraries for tests.
type Row struct {
	Dir      string
	May      []string // folders
	AllAbove bool     // also every row that stands above this one and is not test-only
	Any      bool     // every package that is not test-only
	TestOnly bool     // only tests and other test-only packages may import it
	Why      string
}

// Table is the import table of this module: imports point upward in it, to rows
// that come earlier. It has rows for packages that are designed but not built.
// Tests may import what their package may, and what is test-only.
var Table = []Row{
	{Dir: ".", Why: "the version, which everything may read"},
	{Dir: "internal/sched", Why: "the pure core: runtime, simulator and property tests drive the same code, so it knows none of them"},
	{Dir: "internal/model", Why: "profiles and the lower bound are data and arithmetic"},
	{Dir: "internal/stats", Why: "estimates are computed from numbers that others measure"},
	{Dir: "internal/sim", May: []string{"internal/sched", "internal/model", "internal/stats"},
		Why: "the twin runs the real scheduler in virtual time; it must not need a network"},
	{Dir: "internal/tuner", May: []string{"internal/sched", "internal/stats"},
		Why: "a policy sees configurations and statistics, not how they come about"},
	{Dir: "internal/tuner/static", May: []string{"internal/tuner", "internal/model", "internal/stats"}, Why: "policies do not know each other"},
	{Dir: "internal/tuner/bayes", May: []string{"internal/tuner", "internal/model", "internal/stats"}, Why: "policies do not know each other"},
	{Dir: "internal/tuner/prober", May: []string{"internal/tuner", "internal/model", "internal/stats"}, Why: "policies do not know each other"},
	{Dir: "internal/tuner/twin", May: []string{"internal/tuner", "internal/model", "internal/stats", "internal/sim"},
		Why: "policies do not know each other; this one asks the simulator"},
	{Dir: "internal/tuner/metanet", May: []string{"internal/tuner", "internal/model", "internal/stats", "internal/sim"},
		Why: "policies do not know each other; this one corrects the simulator"},
	{Dir: "internal/wire", Why: "frames are bytes, whatever carries them"},
	{Dir: "internal/transport", May: []string{"internal/wire"}, Why: "connections carry frames and know nothing of training"},
	{Dir: "internal/engine", May: []string{"internal/sched"}, Why: "an engine carries the scheduler's partitions"},
	{Dir: "internal/engine/enginetest", May: []string{"internal/engine", "internal/sched"}, TestOnly: true,
		Why: "the conformance suite tests any engine, so it knows none"},
	{Dir: "internal/engine/native", May: []string{"internal/engine", "internal/sched", "internal/transport", "internal/wire"},
		Why: "engines do not know each other, nor who drives them"},
	{Dir: "internal/engine/external", May: []string{"internal/engine", "internal/sched"},
		Why: "someone else drains its queue, so it needs no connection"},
	{Dir: "internal/control", May: []string{"internal/sched", "internal/stats", "internal/transport", "internal/wire"},
		Why: "agreeing on orders and epochs needs no engine"},
	{Dir: "internal/worker", AllAbove: true, Why: "one rank, assembled: the only place that joins the parts"},
	{Dir: "internal/trace", May: []string{"internal/stats"}, Why: "timelines and metrics show what was measured"},
	{Dir: "internal/lab", May: []string{"internal/worker", "internal/model", "internal/trace"},
		Why: "an emulated cluster runs workers as they are, and reaches into no part of them"},
	{Dir: "internal/report", May: []string{"internal/model"}, Why: "tables are made from results, without running anything"},
	{Dir: "internal/dash", May: []string{"internal/stats", "internal/trace"}, Why: "the page shows what was measured"},
	{Dir: "internal/archtest", TestOnly: true, Why: "it looks at the tree from outside"},
	{Dir: "cmd/autobyte", Any: true, Why: "the command line reaches everything"},
	{Dir: "cmd/libautobyte", May: []string{".", "internal/worker"}, Why: "the C interface is one thin layer over a worker"},
	{Dir: "e2e", Why: "black-box tests run built programs"},
}

// cgoDirs are the folders whose files may import "C": everything else builds
// without a C compiler.
var cgoDirs = []string{"cmd/libautobyte"}

// testLibraries are modules that only tests and test-only packages may import.
var testLibraries = []string{
	"testing", "github.com/google/go-cmp", "pgregory.net/rapid", "go.uber.org/goleak",
}
