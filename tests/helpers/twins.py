"""Slow twins: independent reference implementations, plain NumPy float64 (and exact fractions).

Written from published sources only (each docstring names its own); none of the project's code was seen.
Nothing here is meant to be fast.  Obvious above all.

    fedcof_parts, fedcof_head                                   FedCOF classifier
    class_moments, moments_as_float                             exact count / mean / unbiased covariance per class
    ridge_with_penalties, standardised_ridge                    least squares + intercept, one penalty per feature
    hat_matrix, gcv_score, gcv_choose                           generalised cross-validation, explicit hat matrix
    leave_one_out, leave_one_out_choose                         leave-one-out by refitting
    lda_with_ridge                                              linear discriminant analysis
"""

from fractions import Fraction

import numpy as np

# --------------------------------------------------------------------------------------------------
# 1. FedCOF
# --------------------------------------------------------------------------------------------------


def fedcof_parts(means, counts, gamma):
    """Everything FedCOF's server makes before the inversion.

    Source: Goswami, Magistri, Wang, Twardowski, Bagdanov, van de Weijer, "Covariances for Free: Exploiting
    Mean Distributions for Training-free Federated Learning", NeurIPS 2025, arXiv 2412.14326, section 4
    (covariance estimator; Gram matrix without the between-class scatter; read second-hand); authors' code
    github.com/dipamgoswami/FedCOF at c2e9296, file federate_classes.py, FedCOFServer.aggregate, lines 102-159.
    Where paper and code differ the code is followed.

    means  (K, C, d): mean of the features of class c on client k; ignored where counts[k, c] == 0.
    counts (K, C):    number of examples of class c on client k.

    Returns a dict: class_counts (C,), class_means (C, d; zeros where empty), class_covs (C, d, d; shrunk; zeros
    where empty), clients_of_class (C,), global_mean (d,), gram (d, d), rhs (C, d).
    """
    means = np.asarray(means, dtype=np.float64)
    counts = np.asarray(counts, dtype=np.float64)
    K, C, d = means.shape
    assert counts.shape == (K, C)

    class_counts = np.zeros(C)
    rhs = np.zeros((C, d))  # sum of features per class: federate_classes.py:118
    clients_of_class = np.zeros(C, dtype=int)
    for k in range(K):
        for c in range(C):
            if counts[k, c] > 0:  # a client only sends classes that it has: :235-252
                rhs[c] += means[k, c] * counts[k, c]
                class_counts[c] += counts[k, c]
                clients_of_class[c] += 1

    total = class_counts.sum()
    if total == 0:
        raise ZeroDivisionError("no examples at all")  # the authors' code divides int 0 by int 0 at :151

    class_means = np.zeros((C, d))
    class_covs = np.zeros((C, d, d))
    for c in range(C):
        if class_counts[c] == 0:  # :133, class left out of everything
            continue
        class_means[c] = rhs[c] / class_counts[c]  # :123, weighted by counts
        scatter = np.zeros((d, d))
        for k in range(K):
            if counts[k, c] > 0:
                deviation = means[k, c] - class_means[c]  # :139
                scatter += counts[k, c] * np.outer(deviation, deviation)  # :140-141, weight n_kc
        if clients_of_class[c] > 1:
            class_covs[c] = scatter / (clients_of_class[c] - 1)  # :142-143, clients HAVING the class, less one
        else:
            class_covs[c] = scatter / 1  # :144-145, nought up to rounding
        class_covs[c] += gamma * np.eye(d)  # :146 and :90-93, added, not blended

    global_mean = np.zeros(d)
    for c in range(C):
        global_mean += class_means[c] * class_counts[c]  # :137
    global_mean /= total  # :151

    gram = np.zeros((d, d))
    for c in range(C):
        if class_counts[c] > 0:
            gram += (class_counts[c] - 1) * class_covs[c]  # :155-158, gamma is multiplied by N_c - 1
    gram += total * np.outer(global_mean, global_mean)  # :153 and :159, GLOBAL mean only
    # No between-class term sum_c N_c (mu_c - mu_g)(mu_c - mu_g)^T, no further lambda I (:161 is commented out).

    return {
        "class_counts": class_counts,
        "class_means": class_means,
        "class_covs": class_covs,
        "clients_of_class": clients_of_class,
        "global_mean": global_mean,
        "gram": gram,
        "rhs": rhs,
    }


def fedcof_head(means, counts, gamma, eps=2.0**-52):
    """FedCOF's classifier weight (C, d): rows of pinv(gram) @ rhs, each divided by its 2-norm.  No bias.

    Source: as fedcof_parts; federate_classes.py lines 162-168 (pseudo-inverse, right-hand side) and 95-97
    (torch.nn.functional.normalize: x / max(||x||_2, 1e-12) per row).
    torch.linalg.pinv without arguments drops singular values <= max(m, n) * eps * largest (PyTorch documentation
    of torch.linalg.pinv: rtol default when atol is not given); eps is that of the dtype.  The authors run in
    float32, so pass eps=np.finfo(np.float32).eps to imitate their cut-off (the rest stays float64).
    A class with no examples gets a row of zeros.
    """
    parts = fedcof_parts(means, counts, gamma)
    d = parts["gram"].shape[0]

    u, s, vt = np.linalg.svd(parts["gram"])
    inverse = np.zeros((d, d))
    for i in range(d):
        if s[i] > d * eps * s[0]:
            inverse += np.outer(vt[i], u[:, i]) / s[i]

    weight = np.zeros_like(parts["rhs"])
    for c in range(len(weight)):
        row = inverse @ parts["rhs"][c]
        weight[c] = row / max(np.sqrt(np.sum(row * row)), 1e-12)
    return weight


# --------------------------------------------------------------------------------------------------
# 2. Exact class moments
# --------------------------------------------------------------------------------------------------


def class_moments(features, labels, C):
    """Count, mean and unbiased covariance of each class, exactly, with fractions.Fraction.

    Source: the definitions.  mean = (1/n) sum x;  cov_ij = 1/(n-1) sum (x_i - mean_i)(x_j - mean_j)
    (Hastie, Tibshirani, Friedman, "The Elements of Statistical Learning", 2nd ed., section 4.3, per class).
    Every float is a dyadic rational, so Fraction(float) loses nothing; there is no rounding anywhere.

    Returns three lists of length C: counts (int), means (list of d Fractions; None if the class is empty),
    covs (d x d lists of Fractions; None if the class has fewer than two examples).
    """
    rows = [
        [Fraction(float(v)) if not isinstance(v, (int, Fraction)) else Fraction(v) for v in row] for row in features
    ]
    labels = [int(label) for label in labels]
    assert all(0 <= label < C for label in labels)
    d = len(rows[0]) if rows else 0

    counts, means, covs = [], [], []
    for c in range(C):
        members = [row for row, label in zip(rows, labels, strict=True) if label == c]
        n = len(members)
        counts.append(n)
        if n == 0:
            means.append(None)
            covs.append(None)
            continue
        mean = [sum(row[j] for row in members) / n for j in range(d)]
        means.append(mean)
        if n == 1:
            covs.append(None)
            continue
        covs.append(
            [
                [sum((row[i] - mean[i]) * (row[j] - mean[j]) for row in members) / (n - 1) for j in range(d)]
                for i in range(d)
            ]
        )
    return counts, means, covs


def moments_as_float(counts, means, covs, d, undefined=np.nan):
    """class_moments' answer as float64 arrays (C,), (C, d), (C, d, d), each number correctly rounded once.

    Source: Python documentation, fractions / int.__truediv__: float(Fraction) is correctly rounded.
    """
    C = len(counts)
    mean_array = np.full((C, d), undefined)
    cov_array = np.full((C, d, d), undefined)
    for c in range(C):
        if means[c] is not None:
            mean_array[c] = [float(v) for v in means[c]]
        if covs[c] is not None:
            cov_array[c] = [[float(v) for v in row] for row in covs[c]]
    return np.array(counts), mean_array, cov_array


# --------------------------------------------------------------------------------------------------
# 3. Standardised ridge, generalised cross-validation, leave-one-out
# --------------------------------------------------------------------------------------------------


def ridge_with_penalties(features, targets, penalties):
    """Minimise sum_i ||y_i - b - W x_i||^2 + sum_j penalties_j ||W_:j||^2; the intercept b is not penalised.

    Source: Hastie, Tibshirani, Friedman, "The Elements of Statistical Learning", 2nd ed., eq. (3.41) and the
    remark after it (centre the inputs, b = mean of y), with one penalty per input; solved as ordinary least
    squares on data with one extra row sqrt(penalty_j) e_j and target 0 per input (ibid., exercise 3.12).

    Returns weight (targets, d), intercept (targets,).  A column that is constant gets weight 0 (its centred
    values are nought, so any positive penalty gives 0; with penalty 0 it is the least-norm choice).
    """
    features = np.asarray(features, dtype=np.float64)
    targets = np.asarray(targets, dtype=np.float64)
    penalties = np.asarray(penalties, dtype=np.float64)
    n, d = features.shape
    feature_mean = features.mean(axis=0)
    target_mean = targets.mean(axis=0)

    varying = [j for j in range(d) if features[:, j].max() > features[:, j].min()]
    design = np.zeros((n + len(varying), len(varying)))
    answer = np.zeros((n + len(varying), targets.shape[1]))
    answer[:n] = targets - target_mean
    for column, j in enumerate(varying):
        design[:n, column] = features[:, j] - feature_mean[j]
        design[n + column, column] = np.sqrt(penalties[j])

    weight = np.zeros((targets.shape[1], d))
    if varying:
        q, r = np.linalg.qr(design)
        weight[:, varying] = np.linalg.solve(r, q.T @ answer).T
    intercept = target_mean - weight @ feature_mean
    return weight, intercept


def standardised_ridge(features, onehot, share):
    """Least squares with intercept and penalty share * n * var_j * w_j^2 on feature j.

    Source: scikit-learn documentation: StandardScaler (z = (x - mean) / sd, sd with divisor n, sd of a constant
    feature taken as 1) and Ridge (||y - Xw||^2 + alpha ||w||^2, intercept not penalised), alpha = share * n,
    then w_j = w^z_j / sd_j: alpha (w^z_j)^2 = share * n * var_j * w_j^2.

    Returns weight (C, d), intercept (C,).
    """
    features = np.asarray(features, dtype=np.float64)
    n, d = features.shape
    penalties = np.zeros(d)
    for j in range(d):
        centred = features[:, j] - features[:, j].mean()
        penalties[j] = share * n * np.mean(centred**2)
    return ridge_with_penalties(features, onehot, penalties)


def hat_matrix(features, share):
    """The n x n matrix H with fitted values = H @ onehot, the intercept's part included.

    Source: definition of a linear smoother (ESL section 5.4.1 / 7.10.1, yhat = S y): column i of H is the
    fit to the i-th unit vector.  So H is made by n fits, with no algebra.
    """
    features = np.asarray(features, dtype=np.float64)
    features = features - features.mean(axis=0)  # changes no fit (there is an intercept), only saves digits
    weight, intercept = standardised_ridge(features, np.eye(len(features)), share)
    return features @ weight.T + intercept


def gcv_score(features, onehot, share, count_intercept=True):
    """Generalised cross-validation: (1/n) ||(I - H) Y||_F^2 / [(1/n) tr(I - H)]^2.

    Source: Golub, Heath, Wahba, "Generalized cross-validation as a method for choosing a good ridge parameter",
    Technometrics 21 (1979), its V(lambda), with H the explicit hat matrix; several targets: their squares summed
    (one share for all).  count_intercept=False leaves the intercept's 1 out of tr(H).
    """
    onehot = np.asarray(onehot, dtype=np.float64)
    n = len(onehot)
    H = hat_matrix(features, share)
    residual = onehot - H @ onehot
    freedom = n - np.trace(H)
    if not count_intercept:
        freedom += 1.0
    return (np.sum(residual**2) / n) / (freedom / n) ** 2


def gcv_choose(features, onehot, shares, count_intercept=True):
    """(best share, scores) by gcv_score over the grid; the first of equals wins.  Source: as gcv_score."""
    scores = np.array([gcv_score(features, onehot, share, count_intercept) for share in shares])
    return shares[int(np.argmin(scores))], scores


def leave_one_out(features, onehot, share, fixed_penalty=False):
    """Mean over examples of the squared error on the one left out, by n refits.

    Source: definition (ESL section 7.10, K-fold with K = n; Allen's PRESS).
    fixed_penalty=False: the whole recipe is refitted on the n-1 others (their means, their variances, share*(n-1)).
    fixed_penalty=True:  penalties share*n*var_j stay those of all n examples (then the well-known
                         residual_i / (1 - H_ii) is exact, ESL eq. (7.64)).
    Returns (mean squared error summed over targets, matrix (n, C) of left-out residuals y - prediction).
    """
    features = np.asarray(features, dtype=np.float64)
    features = features - features.mean(axis=0)  # changes no fit (there is an intercept), only saves digits
    onehot = np.asarray(onehot, dtype=np.float64)
    n = len(features)
    residual = np.zeros_like(onehot)
    for i in range(n):
        others = [k for k in range(n) if k != i]
        if fixed_penalty:
            penalties = share * n * features.var(axis=0)
            weight, intercept = ridge_with_penalties(features[others], onehot[others], penalties)
        else:
            weight, intercept = standardised_ridge(features[others], onehot[others], share)
        residual[i] = onehot[i] - (weight @ features[i] + intercept)
    return np.sum(residual**2) / n, residual


def leave_one_out_choose(features, onehot, shares, fixed_penalty=False):
    """(best share, scores) by leave_one_out over the grid; the first of equals wins.  Source: as leave_one_out."""
    scores = np.array([leave_one_out(features, onehot, share, fixed_penalty)[0] for share in shares])
    return shares[int(np.argmin(scores))], scores


# --------------------------------------------------------------------------------------------------
# 4. Linear discriminant analysis
# --------------------------------------------------------------------------------------------------


def lda_with_ridge(features, labels, ridge_vector, C=None, points=None):
    """Linear discriminant analysis with covariance S_w + diag(ridge) / n, S_w = within-class scatter / n.

    Source: ESL, 2nd ed., eq. (4.10): delta_c(x) = x' S^-1 mu_c - mu_c' S^-1 mu_c / 2 + log pi_c, pi_c = n_c / n.
    ESL divides the scatter by n - C; here it is n, the maximum-likelihood estimate (as scikit-learn's
    LinearDiscriminantAnalysis(solver="lsqr")).  The ridge makes n * covariance = scatter + diag(ridge).

    Returns weight (C, d), bias (C,), logits (len(points), C); points defaults to features.
    An empty class gets weight 0 and bias -inf (log of prior 0).
    """
    features = np.asarray(features, dtype=np.float64)
    labels = np.asarray(labels).astype(int)
    ridge_vector = np.broadcast_to(np.asarray(ridge_vector, dtype=np.float64), (features.shape[1],))
    points = features if points is None else np.asarray(points, dtype=np.float64)
    n, d = features.shape
    C = int(labels.max()) + 1 if C is None else C

    counts = np.zeros(C)
    means = np.zeros((C, d))
    for c in range(C):
        counts[c] = np.sum(labels == c)
        if counts[c] > 0:
            means[c] = features[labels == c].mean(axis=0)

    scatter = np.zeros((d, d))
    for i in range(n):
        deviation = features[i] - means[labels[i]]
        scatter += np.outer(deviation, deviation)
    covariance = scatter / n + np.diag(ridge_vector) / n

    weight = np.zeros((C, d))
    bias = np.full(C, -np.inf)
    for c in range(C):
        if counts[c] > 0:
            weight[c] = np.linalg.solve(covariance, means[c])
            bias[c] = -0.5 * means[c] @ weight[c] + np.log(counts[c] / n)
    logits = points @ weight.T + bias
    return weight, bias, logits
